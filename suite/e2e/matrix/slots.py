"""Blocks at work: each slot runs one block at a time, its arms one after another on the slot's GPU.

Slots are threads that wait for children. What becomes of a block is told to the parent's main thread, the
only one that judges and writes.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from suite.e2e.matrix.executors import LocalExecutor
from suite.e2e.matrix.schedule import Block
from suite.e2e.matrix.spool import Concluded, Spool
from suite.records import CellJob, Outcome

Skip = tuple[str, str]  # reason code and reason


class Work(NamedTuple):
    """One attempt at a block."""

    block: Block
    attempt: int = 1


class Started(NamedTuple):
    """A child is about to run."""

    job: CellJob


class Done(NamedTuple):
    """Every arm of a block has ended, `results` in the order of its jobs."""

    work: Work
    results: list[tuple[CellJob, Concluded]]


class Failed(NamedTuple):
    """A slot met an error that is no child's."""

    error: BaseException


Event = Started | Done | Failed


class Slots:
    """As many threads as `gpus`; each child sees its slot's GPU alone, every one where that is None."""

    def __init__(
        self,
        executor: LocalExecutor,
        spool: Spool,
        gpus: Sequence[str | None],
        why_skip: Callable[[], Skip | None],
        now: Callable[[], object],
    ) -> None:
        self.executor, self.spool, self.why_skip, self.now = executor, spool, why_skip, now
        self.todo: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.threads = [threading.Thread(target=self.serve, args=(gpu,), daemon=True) for gpu in gpus]
        for thread in self.threads:
            thread.start()

    def submit(self, work: Work) -> None:
        self.todo.put(work)

    def close(self) -> None:
        """Wait for the slots to end; whatever was submitted before is done or skipped first."""
        for _ in self.threads:
            self.todo.put(None)
        for thread in self.threads:
            thread.join()

    def serve(self, gpu: str | None) -> None:
        while (work := self.todo.get()) is not None:
            try:
                self.events.put(
                    Done(work, [self.run(job, work.attempt, gpu) for job in work.block.attempt(work.attempt)])
                )
            except BaseException as error:  # raised again by the main thread
                self.events.put(Failed(error))

    def run(self, job: CellJob, attempt: int, gpu: str | None) -> tuple[CellJob, Concluded]:
        """How `job` ended: taken up from the spool, skipped, or run now."""
        if known := self.spool.concluded(job, attempt):
            return job, known
        started_at = self.now()
        if skip := self.why_skip():
            outcome = Outcome(status="skipped", reason_code=skip[0], reason=skip[1])
            return job, Concluded(started_at=started_at, outcome=outcome)
        self.events.put(Started(job))
        outcome = self.executor.run(job, self.spool.fresh(job, attempt), gpu)
        concluded = Concluded(started_at=started_at, outcome=outcome)
        if outcome.status != "skipped":
            self.spool.conclude(job, attempt, concluded)
        return job, concluded
