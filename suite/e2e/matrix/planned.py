"""What one run executes: cells, their arms, and how often each pair is repeated. A run stores its whole plan."""

from suite.records import Arm, Cell, CellJob, Record


class PlannedCell(Record):
    """One cell with its arms, static first: it is what the others are held to."""

    cell: Cell
    arms: tuple[Arm, ...]
    timeout_s: float
    blocks: int = 1
    priority: int = 0  # the higher, the earlier it runs and the later a budget drops it
    memory_gib: float | None = None


class Plan(Record):
    """What one run executes."""

    name: str
    cells: tuple[PlannedCell, ...]

    def jobs(self) -> list[CellJob]:
        """One job per (cell, block, arm), each cell's together. A planted arm runs in one block: it times nothing."""
        return [
            CellJob(cell=planned.cell, arm=arm, block=block, timeout_s=planned.timeout_s, memory_gib=planned.memory_gib)
            for planned in self.cells
            for block in range(planned.blocks)
            for arm in planned.arms
            if block == 0 or not arm.plants
        ]
