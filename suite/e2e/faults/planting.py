"""Plants faults of the registry into this process, by name: what a planted arm of a matrix run does.

A fault stands in the code and not in one engine, so the engine that it is meant for is built while it stands: a
mistake in what is captured or laid out at the start is one too.
"""

import contextlib
from collections.abc import Iterator, Sequence

from suite.e2e.faults.names import ENGINE_FAULTS
from suite.e2e.faults.seams import planted
from suite.errors import UnknownNameError


@contextlib.contextmanager
def planting(names: Sequence[str]) -> Iterator[None]:
    """The faults of these names stand while the block runs; UnknownNameError for one that no engine has a seam for."""
    for name in names:
        if name not in ENGINE_FAULTS:
            raise UnknownNameError("plant", name, ENGINE_FAULTS)
    with contextlib.ExitStack() as stack:
        if names:
            from suite.e2e.faults.detection.registry import FAULTS  # late: it brings every scenario along

            for name in names:
                stack.enter_context(planted(FAULTS[name]))
        yield
