"""Pool behaviour over a run: bytes live, free and fragmented by kind, moves and what they cost."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from suite.e2e.engine.requests import Request
from suite.kernels.allocators.paged import PageAllocator


@dataclass
class Range:
    """Mean and peak of a quantity."""

    total: float = 0.0
    peak: float = 0.0
    n: int = 0

    def add(self, value: float) -> None:
        self.total += value
        self.peak = max(self.peak, value)
        self.n += 1

    @property
    def mean(self) -> float:
        return self.total / self.n if self.n else 0.0


class PoolMeter:
    """Samples an allocator once a step. `live_bytes` and `fragmented_bytes` are by kind, `free_pages` are joint."""

    def __init__(self, allocator: PageAllocator) -> None:
        self.allocator = allocator
        self.reset()
        self._compact: Callable[..., int] = allocator.compact
        allocator.compact = self._timed_compact  # type: ignore[method-assign]

    def reset(self) -> None:
        self.live_bytes: dict[str, Range] = defaultdict(Range)
        self.fragmented_bytes: dict[str, Range] = defaultdict(Range)
        self.free_pages = Range()
        self.largest: dict[str, int] = {}  # most requests of a group in one batch
        self.compactions, self.compact_s = 0, 0.0

    def sample(self, running: Sequence[Request]) -> None:
        for group, count in Counter(request.group for request in running).items():
            self.largest[group] = max(count, self.largest.get(group, 0))
        for kind, live in self.allocator.bytes_in_use().items():
            self.live_bytes[kind].add(live)
        for span in self.allocator.spans:
            self.fragmented_bytes[span.kind].add((span.holes + span.pending) * span.page_bytes)
        self.free_pages.add(self.allocator.available_pages())

    def _timed_compact(self, *, urgent: bool = False) -> int:
        begin = time.perf_counter()
        moved = self._compact(urgent=urgent)
        if moved:
            self.compactions += 1
            self.compact_s += time.perf_counter() - begin
        return moved
