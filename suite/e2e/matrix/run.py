"""The parent: every planned arm becomes exactly one row, whatever happens to its child or to this process.

Children run one after another; the rows are judged and written here, by the only writer. On SIGINT,
SIGTERM or SIGHUP the child at work is ended and what is left of the plan becomes `skipped` rows.
"""

import contextlib
import datetime
import math
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import msgspec
import sqlalchemy as sa

from db.checks import check_outcome
from db.keys import utc_now
from db.store import Comparison, Store
from suite.e2e.matrix.executors import LocalExecutor, crashed
from suite.e2e.matrix.judge import Exactness, Ruling, judge
from suite.e2e.matrix.plan import Plan
from suite.errors import InputError
from suite.provenance import code_revision
from suite.records import CellJob, Outcome, Status, content_hash

SPOOL = "kvproof-spool"
EXACTNESS_METHOD, EXACTNESS_VERSION = "bit_identity", 1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last: its terminal went away
INTERRUPTED_EXIT_CODE = 130

Progress = Callable[[int, CellJob, Outcome | None], None]  # number of the job, and its outcome once there is one


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to."""

    run: str
    planned: int
    statuses: Counter[str]
    interrupted: bool

    @property
    def exit_code(self) -> int:
        """0: every row passed or was refused. 1: one is wrong. 3: one crashed or timed out. 130: interrupted."""
        if self.interrupted:
            return INTERRUPTED_EXIT_CODE
        if self.statuses["wrong"]:
            return 1
        return 0 if self.statuses["passed"] + self.statuses["refused"] == self.planned else 3


class Stop:
    """Whether a signal has asked for the end. Only recorded: nothing is ever cut off in the middle of a write."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        return self.asked

    def ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take over the signals; outside the main thread there are none to take."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores
        before = {number: signal.signal(number, self.ask) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run_plan(
    plan: Plan, engine: sa.Engine, *, command: Sequence[str] | None = None, progress: Progress | None = None
) -> RunSummary:
    """Run `plan` into the database of `engine`. `command` is the child's, which gets two paths: job and outcome."""
    jobs, store, stop = plan.jobs(), Store(engine), Stop()
    with stop.listening(), spool_folder(engine) as spool:
        run_id = store.begin_run(plan.name, msgspec.to_builtins(plan), jobs, code_revision())
        writer = RowWriter(store, run_id, len(jobs))
        state = "failed"
        try:
            run_jobs(jobs, writer, LocalExecutor(spool, command, stopped=stop), stop, progress)
            state = "interrupted" if stop.asked else "finished"
        finally:
            # after an error of ours the plan still ends as rows
            skip_rest(jobs, writer, "interrupted" if stop.asked else "parent_failed")
            store.end_run(run_id, state)
    return RunSummary(run=run_id, planned=len(jobs), statuses=writer.statuses, interrupted=stop.asked)


def run_jobs(
    jobs: Sequence[CellJob], writer: "RowWriter", executor: LocalExecutor, stop: Stop, progress: Progress | None
) -> None:
    for number, job in enumerate(jobs):
        if stop.asked:
            return
        if progress:
            progress(number, job, None)
        started_at = utc_now()
        outcome = writer.write(job, executor.run(job), started_at)
        if progress:
            progress(number, job, outcome)


def skip_rest(jobs: Sequence[CellJob], writer: "RowWriter", reason_code: str) -> None:
    """A `skipped` row for every job that has none yet."""
    why = "interrupted before it ran" if reason_code == "interrupted" else "the run failed before it ran"
    for job in jobs[sum(writer.statuses.values()) :]:
        writer.write(job, Outcome(status="skipped", reason_code=reason_code, reason=why), utc_now())


class RowWriter:
    """Judges outcomes and makes them rows, in plan order."""

    def __init__(self, store: Store, run_id: str, planned: int) -> None:
        self.store, self.run_id, self.planned = store, run_id, planned
        self.statuses: Counter[Status] = Counter()
        self.static: dict[tuple[str, int], tuple[str, Outcome]] = {}  # per cell and block: row id and outcome

    def write(self, job: CellJob, outcome: Outcome, started_at: datetime.datetime) -> Outcome:
        """The outcome that became the row of `job`."""
        key = (content_hash(job.cell), job.block)
        static_id, static = self.static.get(key, (None, None))
        try:
            check_outcome(outcome)
            ruling = judge(job.cell, job.arm, outcome, static)
            row_id = self.ingest(job, ruling, started_at, static_id)
        except InputError as error:  # the child's claim is no row; that it made one is
            same = {name: getattr(outcome, name) for name in ("exit_code", "signal", "stderr_tail", "duration_s")}
            refused = msgspec.structs.replace(
                crashed("bad_outcome", f"wrote an outcome that is no row: {error}"), **same
            )
            ruling = Ruling(outcome=refused)
            row_id = self.ingest(job, ruling, started_at, None)
        if job.arm.pool == "static":
            self.static = {key: (row_id, ruling.outcome)}  # one cell at a time: samples can be large
        self.statuses[ruling.outcome.status] += 1
        return ruling.outcome

    def ingest(self, job: CellJob, ruling: Ruling, started_at: datetime.datetime, static_id: str | None) -> str:
        exactness = ruling.exactness
        comparisons = exactness_rows(exactness, static_id) if exactness and static_id else []
        return self.store.ingest(self.run_id, job, ruling.outcome, started_at=started_at, comparisons=comparisons)


def exactness_rows(exactness: Exactness, static_id: str) -> list[Comparison]:
    """`exactness` as the database keeps it, against the row `static_id`."""
    effects = {f"max_{exactness.of}_diff": exactness.max_diff}
    if exactness.tokens:
        effects["token_mismatches"] = float(exactness.token_mismatches)
    return [
        Comparison(
            static_id=static_id,
            metric=metric,
            method=EXACTNESS_METHOD,
            version=EXACTNESS_VERSION,
            effect=effect if math.isfinite(effect) else None,
            verdict="equal" if effect == 0.0 else "differs",
        )
        for metric, effect in effects.items()
    ]


@contextlib.contextmanager
def spool_folder(engine: sa.Engine) -> Iterator[Path]:
    """A folder for the children's files, beside a SQLite file or among the system's temporary ones; removed after."""
    database = engine.url.database
    beside = engine.dialect.name == "sqlite" and database not in (None, "", ":memory:")
    parent = Path(str(database)).resolve().parent if beside else None
    try:
        folder = tempfile.TemporaryDirectory(prefix=f"{SPOOL}-", dir=parent)  # one of its own: runs may overlap
    except OSError as error:
        raise InputError("spool", str(parent), f"a folder that can be written ({error.strerror})") from error
    with folder as path:
        yield Path(path)
