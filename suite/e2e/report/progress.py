"""What a run is doing, on stderr: one line per row, and on a terminal the job at work."""

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from suite.records import CellJob, Outcome


class ConsoleProgress:
    """Called with each job's number, before it runs with no outcome and after with its own."""

    def __init__(self, planned: int) -> None:
        self.planned = planned
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.status: Status | None = None

    def __call__(self, number: int, job: CellJob, outcome: Outcome | None) -> None:
        cell, arm = job.cell, job.arm
        plants = "".join(f"+{plant}" for plant in arm.plants)
        name = f"[{number + 1}/{self.planned}] {cell.model} {cell.backend} {cell.launcher} {arm.pool}{plants}"
        if outcome is None:
            if self.console.is_terminal:
                self.status = self.console.status(escape(name))
                self.status.start()
            return
        if self.status is not None:
            self.status.stop()
            self.status = None
        reason = f" ({outcome.reason_code}: {outcome.reason})" if outcome.reason else ""
        self.console.print(f"{name}: {outcome.status} in {outcome.duration_s:.1f} s{reason}", markup=False)
