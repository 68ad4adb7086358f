"""The churn stage: makes pages move, so that a wrong translation cannot look right.

Ballast pages sit between the requests' pages and are given back while these live; packing then
moves the survivors. Both arms take and free the same virtual pages in the same order, so their
schedules stay equal; only a unified pool moves anything.
"""

import random

import numpy as np

from suite.kernels.allocators.paged import PageAllocator
from suite.kernels.allocators.window import UnifiedAllocator

BALLAST_SHARE = 0.5  # of the pages that requests hold at most


class Churn:
    """Owns the ballast. `pages`: how many pages requests hold at most; the pool must have `ballast` more."""

    def __init__(self, allocator: PageAllocator, pages: int, seed: int) -> None:
        self.allocator = allocator
        self.ballast = self.ballast_pages(pages)
        self._held: list[int] = []
        self._random = random.Random(seed)
        self.live_observed = self.off_identity = self.relocated = 0

    @staticmethod
    def ballast_pages(pages: int) -> int:
        return max(4, int(pages * BALLAST_SHARE))

    def before_step(self) -> None:
        """Free a random half of the ballast, pack, and take ballast again: some survivors move every step."""
        self._random.shuffle(self._held)
        keep = len(self._held) // 2
        self.allocator.free(self._held[keep:])
        del self._held[keep:]
        if isinstance(self.allocator, UnifiedAllocator):
            self.allocator.compact()
        self._held += self.allocator.alloc(self.ballast - keep)

    def observe(self, virtual_pages: list[int]) -> None:
        """Count, for the pages that the next forward reads, how many are not where their number says."""
        if not isinstance(self.allocator, UnifiedAllocator) or not virtual_pages:
            return
        for span in self.allocator.spans:
            physical = span.map.host[virtual_pages]
            live = physical > 0
            self.live_observed += int(live.sum())
            self.off_identity += int((physical[live] != np.asarray(virtual_pages)[live]).sum())
            self.relocated += int(span.relocated[virtual_pages][live].sum())

    def finish(self) -> None:
        self.allocator.free(self._held)
        self._held.clear()

    @property
    def moved_share(self) -> float:
        """Share of page reads whose physical page is not the virtual one: 0.0 means an identity map, a void run."""
        return self.off_identity / self.live_observed if self.live_observed else 0.0

    @property
    def relocated_share(self) -> float:
        """Share of page reads whose page a compaction has moved while it was live."""
        return self.relocated / self.live_observed if self.live_observed else 0.0
