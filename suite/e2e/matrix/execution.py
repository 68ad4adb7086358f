"""The parent at work: blocks go to the slots, their outcomes come back, are ruled on and written together.

Whatever happens to a child, to the database or to this process, a block is in with all its arms or not at
all; what is not in is found again by `resume`.
"""

import contextlib
import queue
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from db.keys import utc_now
from db.session import trouble
from db.store import Entry, LeaseLostError, Store
from suite.e2e.matrix.executors import INFRASTRUCTURE, LocalExecutor
from suite.e2e.matrix.guards import transient
from suite.e2e.matrix.lease import HEARTBEAT_S
from suite.e2e.matrix.ruling import rule_block
from suite.e2e.matrix.slots import Done, Failed, Skip, Slots, Started, Work
from suite.e2e.matrix.spool import Concluded, Spool, SpoolError
from suite.e2e.matrix.stop import Stop
from suite.records import CellJob, Outcome, content_hash

BUDGET = "budget"
LOOK_S = 0.5  # between looks at the clock while nothing happens

Progress = Callable[[int, CellJob, Outcome | None], None]  # number of the job, and its outcome once there is one


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How a plan is executed: what of it, and in what order, is the plan's own matter.

    `command` is the child's, which gets two paths, job and outcome. Each of `gpus` is a slot. A block whose child
    infrastructure ended, or whose GPU was disturbed, is attempted up to `retries` times more.
    """

    command: Sequence[str] | None = None
    progress: Progress | None = None
    gpus: Sequence[str | None] = (None,)
    retries: int = 0
    budget_s: float | None = None


class Execution:
    """Executes attempts at blocks of one run."""

    def __init__(
        self, run_id: str, store: Store, spool: Spool, stop: Stop, options: Options, works: Sequence[Work]
    ) -> None:
        self.run_id, self.store, self.spool, self.stop, self.options = run_id, store, spool, stop, options
        self.cut = False  # by an error of ours
        self.began = self.beat = time.monotonic()
        self.numbers = {number_key(job): n for n, job in enumerate(job for work in works for job in work.block.jobs)}
        self.retried: dict[tuple[str, int], int] = {}

    def run(self, works: Sequence[Work]) -> str:
        """Execute `works`, each to rows; the state in which that leaves the run."""
        unwritten = {work.block.key: work for work in works}
        try:
            with self.slots() as slots:
                for work in works:
                    slots.submit(work)
                while unwritten:
                    self.handle(self.next_event(slots), slots, unwritten)
        except (SpoolError, LeaseLostError):
            raise
        except BaseException as error:
            if trouble(error) is None:  # the database still works: the plan ends as rows
                for work in unwritten.values():
                    self.skip(work, ("parent_failed", "the run failed before it ran"))
            raise
        return "interrupted" if self.stop.asked else "finished"

    @contextlib.contextmanager
    def slots(self) -> Iterator[Slots]:
        """Slots at work, which an error here ends with their children."""
        executor = LocalExecutor(self.options.command, stopped=lambda: self.stop.asked or self.cut)
        slots = Slots(executor, self.spool, self.options.gpus, self.why_skip, utc_now)
        try:
            yield slots
        except BaseException:
            self.cut = True
            raise
        finally:
            slots.close()

    def why_skip(self) -> Skip | None:
        """Why nothing more is to be started; None when it is."""
        if self.cut or self.stop.asked:
            return "interrupted", "interrupted before it ran"
        budget = self.options.budget_s
        if budget is not None and time.monotonic() - self.began > budget:
            return BUDGET, f"the budget of {budget:g} s was spent before it ran"
        return None

    def next_event(self, slots: Slots) -> Started | Done | Failed | None:
        if time.monotonic() - self.beat > HEARTBEAT_S:
            self.store.heartbeat(self.run_id)
            self.beat = time.monotonic()
        try:
            return slots.events.get(timeout=LOOK_S)
        except queue.Empty:
            return None

    def handle(
        self, event: Started | Done | Failed | None, slots: Slots, unwritten: dict[tuple[str, int], Work]
    ) -> None:
        match event:
            case Started(job):
                self.tell(job, None)
            case Failed(error):
                raise error
            case Done(work, results):
                entries = self.write(work, results)
                del unwritten[work.block.key]
                if self.again(work, entries):
                    unwritten[work.block.key] = again = work._replace(attempt=work.attempt + 1)
                    slots.submit(again)

    def again(self, work: Work, entries: Sequence[Entry]) -> bool:
        """Whether the block is worth another attempt."""
        failed = any(entry.outcome.reason_code in INFRASTRUCTURE or transient(entry.void_reason) for entry in entries)
        tried = self.retried.get(work.block.key, 0)
        if not failed or tried >= self.options.retries or self.why_skip():
            return False
        self.retried[work.block.key] = tried + 1
        return True

    def write(self, work: Work, results: Sequence[tuple[CellJob, Concluded]]) -> list[Entry]:
        """Make one attempt at a block rows, whole or not at all, and forget its files."""
        entries = rule_block(results, work.attempt)
        self.store.ingest_all(self.run_id, entries)
        self.spool.drop(work.block.jobs[0], work.attempt)
        for entry in entries:
            self.tell(entry.job, entry.outcome)
        return entries

    def skip(self, work: Work, why: Skip) -> None:
        """A `skipped` row for every arm of a block."""
        outcome = Outcome(status="skipped", reason_code=why[0], reason=why[1])
        jobs = work.block.attempt(work.attempt)
        self.write(work, [(job, Concluded(started_at=utc_now(), outcome=outcome)) for job in jobs])

    def tell(self, job: CellJob, outcome: Outcome | None) -> None:
        if self.options.progress:
            self.options.progress(self.numbers[number_key(job)], job, outcome)


def number_key(job: CellJob) -> tuple[str, str, int]:
    return content_hash(job.cell), content_hash(job.arm), job.block
