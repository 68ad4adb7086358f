"""The churn stage: makes pages move, so that a wrong translation cannot look right.

Ballast pages sit between the requests' pages and are given back while these live; packing then
moves the survivors. Both arms take and free the same virtual pages in the same order, so their
schedules stay equal; only a unified pool moves anything.
"""

import random

from suite.kernels.allocators.paged import PageAllocator

BALLAST_SHARE = 0.5  # of the pages that requests hold at most


class Churn:
    """Owns the ballast. `pages`: how many pages requests hold at most; the pool must have `ballast` more."""

    def __init__(self, allocator: PageAllocator, pages: int, seed: int) -> None:
        self.allocator = allocator
        self.ballast = self.ballast_pages(pages)
        self._held: list[int] = []
        self._random = random.Random(seed)
        self.observed = self.moved = 0

    @staticmethod
    def ballast_pages(pages: int) -> int:
        return max(4, int(pages * BALLAST_SHARE))

    def shuffle(self) -> None:
        """Free a random half of the ballast, pack, take ballast again: what was bound since moves into its place."""
        self._random.shuffle(self._held)
        keep = len(self._held) // 2
        self.allocator.free(self._held[keep:])
        del self._held[keep:]
        self.allocator.compact()
        self._held += self.allocator.alloc(self.ballast - keep)

    def observe(self, virtual_pages: list[int]) -> None:
        """Count, for pages whose earlier rows the next forward reads, how many compaction has moved."""
        for span in self.allocator.spans:
            bound = span.map.host[virtual_pages] > 0
            self.observed += int(bound.sum())
            self.moved += int(span.relocated[virtual_pages][bound].sum())

    @property
    def held(self) -> int:
        """Pages of the ballast."""
        return len(self._held)

    def finish(self) -> None:
        self.allocator.free(self._held)
        self._held.clear()

    @property
    def moved_share(self) -> float:
        """Share of reads of written pages whose page compaction has moved while it was live; 0.0 is a void run.

        Not the share of pages away from their own number: a pool that grows down never binds page n to n.
        """
        return self.moved / self.observed if self.observed else 0.0
