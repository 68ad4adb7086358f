"""Planted faults: known mistakes that the suite must see, each in one registry (`detection.registry`)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from suite.e2e.faults.detection.run import FaultRow


def smoke() -> "list[FaultRow]":
    """The smoke set: a few faults of every kind, one row each. Loads torch: the gate asks for it in a child process."""
    from suite.e2e.faults.detection.run import choose, detect

    return detect(choose(smoke=True))
