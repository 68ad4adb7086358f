"""Planted faults: known defects that the comparison must catch. Names here, planting beside the engine."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from suite.e2e.faults.detection.run import FaultRow

FAULTS: dict[str, str] = {
    "read_skips_translation": "attention reads through virtual ids, as if the page map were the identity",
    "read_translates_twice": "attention reads through the page map applied to its own result: in range, and wrong",
    "read_forgets_multiplier": "attention reads physical pages as if a page held one layer",
    "window_reads_full_map": "window layers read through the full pool's map and multiplier",
    "write_skips_translation": "new rows are stored at virtual ids; reads stay right",
    "window_write_uses_full_ids": "window layers store their rows where the full pool's map says",
    "move_copies_nothing": "compaction rewrites the page map and leaves the rows where they were",
}


def smoke() -> "list[FaultRow]":
    """The smoke set: a few faults of every kind, one row each. Loads torch: the gate asks for it in a child process."""
    from suite.e2e.faults.detection.run import choose, detect

    return detect(choose(smoke=True))
