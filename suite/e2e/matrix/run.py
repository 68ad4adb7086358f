"""A run: a plan announced whole, executed, and closed; or taken up where a dead process left it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from db.keys import utc_now, uuid7
from db.queries import find_run
from db.runs import Attempt, latest_attempts, reason_counts, run_counts, run_record, typical_durations
from db.session import folder_of, trouble
from db.store import LeaseLostError, Store
from suite.e2e.matrix import lease
from suite.e2e.matrix.execution import BUDGET, Execution, Options
from suite.e2e.matrix.executors import INFRASTRUCTURE
from suite.e2e.matrix.planned import Plan
from suite.e2e.matrix.schedule import Block, draw_seed, schedule, within_budget
from suite.e2e.matrix.slots import Work
from suite.e2e.matrix.spool import Spool, SpoolError
from suite.e2e.matrix.stop import Stop
from suite.errors import InputError
from suite.provenance import code_revision, machine
from suite.records import Status, content_hash

INTERRUPTED_EXIT_CODE = 130
NO_OPTIONS = Options()
UNFINISHED = frozenset({"interrupted", "parent_failed"}) | INFRASTRUCTURE


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to. `dropped` of the skipped rows are those for which the budget was too small."""

    run: str
    planned: int
    statuses: Counter[Status]
    interrupted: bool
    dropped: int = 0

    @property
    def exit_code(self) -> int:
        """0: every row passed, was refused or dropped. 1: one is wrong. 3: one crashed, timed out. 130: interrupted."""
        if self.interrupted:
            return INTERRUPTED_EXIT_CODE
        if self.statuses["wrong"]:
            return 1
        return 0 if self.statuses["passed"] + self.statuses["refused"] + self.dropped == self.planned else 3


def run_plan(
    plan: Plan, engine: sa.Engine, options: Options = NO_OPTIONS, *, seed: int | None = None, shard: str | None = None
) -> RunSummary:
    """Run `plan` into the database of `engine`. The seed, drawn when there is none, orders arms and places buffers."""
    seed = draw_seed() if seed is None else seed
    blocks = schedule(plan, seed, typical_durations(engine))
    run_id, store, stop = uuid7(), Store(engine, lease.owner()), Stop()
    spool = Spool.of(run_id, folder_of(engine))
    with stop.listening():
        store.begin_run(
            plan.name,
            msgspec.to_builtins(plan),
            [job for block in blocks for job in block.jobs],
            code_revision(),
            run_id=run_id,
            seed=seed,
            block_seeds={block.key: block.seed for block in blocks},
            shard=shard,
            environment=machine(),
            spool=str(spool.folder),
        )
        works = [Work(block) for block in blocks]
        return execute(engine, Execution(run_id, store, spool, stop, options, works), works)


def resume_run(engine: sa.Engine, run: str | None = None, options: Options = NO_OPTIONS) -> RunSummary:
    """Execute what a run has left unfinished, on the same plan, revision and machine.

    Unfinished are blocks without rows, and those whose latest attempt was interrupted or ended by infrastructure.
    Raises InputError with need and got where the run is another process's or its conditions are not ours.
    """
    record = run_record(engine, find_run(engine, run))
    plan = resumable(record)
    store, stop = Store(engine, lease.owner()), Stop()
    spool = Spool.again(record.spool, record.id, folder_of(engine))
    with stop.listening():
        if not store.take_over(record.id, record.lease_owner, str(spool.folder)):
            raise InputError("run", record.id, "a run that no other process has just taken over")
        spool.end_orphans()
        works = unfinished(schedule(plan, record.seed, typical_durations(engine)), latest_attempts(engine, record.id))
        return execute(engine, Execution(record.id, store, spool, stop, options, works), works)


def execute(engine: sa.Engine, execution: Execution, works: Sequence[Work]) -> RunSummary:
    """Execute `works` within the budget, and close the run. An error leaves it `failed`, or resumable as it is."""
    run_id, store, options = execution.run_id, execution.store, execution.options
    try:
        execution.spool.create()
        fit = len(works)
        if options.budget_s is not None:
            fit = within_budget([work.block for work in works], options.budget_s, len(options.gpus))
        for work in works[fit:]:
            execution.skip(work, (BUDGET, f"estimated to end beyond the budget of {options.budget_s:g} s"))
        state = execution.run(works[:fit])
    except LeaseLostError:
        raise
    except BaseException as error:
        if trouble(error) is None:
            store.end_run(run_id, "failed")
        if not isinstance(error, SpoolError) and trouble(error) is None:
            execution.spool.remove()  # every row is in
        raise
    execution.spool.remove()
    store.end_run(run_id, state)
    return summary_of(engine, run_id, interrupted=execution.stop.asked)


def resumable(record: Any) -> Plan:
    """The plan of a stored run that this process may take up; InputError with need and got where it may not."""
    if (
        record.state == "running"
        and record.lease_owner
        and lease.alive(record.lease_owner, record.heartbeat_at, utc_now())
    ):
        raise InputError("run", record.id, f"a run that nobody executes: {record.lease_owner} does, and is alive")
    if record.seed is None or record.environment is None:
        raise InputError("run", record.id, "a run that can be resumed: this one has no seed and no machine on record")
    revision = code_revision()
    got, need = (revision.sha, revision.patch_sha), (record.sha, record.patch_sha)
    if got != need:
        raise InputError(
            "revision", " + ".join(filter(None, got)), f"{' + '.join(filter(None, need))}, that of the run"
        )
    here = machine()
    for name in sorted({*here, *record.environment}):
        if here.get(name) != record.environment.get(name):
            raise InputError(f"machine.{name}", here.get(name), f"{record.environment.get(name)!r}, that of the run")
    if content_hash(record.plan) != record.plan_sha:
        raise InputError("plan", content_hash(record.plan), f"{record.plan_sha}, the hash that the run noted")
    return msgspec.convert(record.plan, Plan)


def unfinished(blocks: Sequence[Block], latest: Mapping[tuple[str, int], Attempt]) -> list[Work]:
    """What is left to do, each as its next attempt."""
    works = []
    for block in blocks:
        last = latest.get(block.key)
        if last is None:
            works.append(Work(block))
        elif last.reason_codes & UNFINISHED:
            works.append(Work(block, last.number + 1))
    return works


def summary_of(engine: sa.Engine, run_id: str, *, interrupted: bool) -> RunSummary:
    return RunSummary(
        run=run_id,
        planned=run_record(engine, run_id).planned,
        statuses=run_counts(engine, run_id),
        interrupted=interrupted,
        dropped=reason_counts(engine, run_id)[BUDGET],
    )
