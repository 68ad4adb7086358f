"""One sub-pool's span of the unified buffer, and how its pages are packed.

The lowest span of a buffer grows up from the sink, the highest grows down from the end, and spans between
them float: they grow at both sides. Pages are counted by *rank*, for the one that grows down from the end,
for all others from the first page behind the sink, so that all share every line below: ranks `start` to
`end` are in use, and each of those is live, a hole, or pending (a page that was moved away from, or freed,
while the forward in flight may still use it). Only a float's start is ever other than 0.
"""

import enum
from collections.abc import Sequence, Set

import numpy as np
import torch

from suite.errors import InvariantError
from suite.kernels.allocators.books import UNMAPPED, PageMap
from suite.kernels.pools.layout import SpanPlan
from suite.kernels.pools.unified import UnifiedPool
from suite.kernels.upload import upload

UNUSED, LIVE, HOLE, PENDING = 0, 1, 2, 3
Reach = tuple[int, int]  # the ranks a span is to use: start, end


class Growth(enum.Enum):
    UP = "up"
    DOWN = "down"
    BOTH = "both"


class Span:
    """Live pages, holes and the boundaries of one sub-pool."""

    def __init__(self, pool: UnifiedPool, plan: SpanPlan, growth: Growth, virtual_pages: int) -> None:
        self.pool, self.plan, self.growth = pool, plan, growth
        self.kind, self.page_bytes = plan.kind, plan.page_bytes
        self.map = PageMap(virtual_pages, pool.device)
        self.owner = np.full(plan.num_pages, UNMAPPED, dtype=np.int64)  # physical page -> virtual page
        self.relocated = np.zeros(virtual_pages, dtype=bool)  # live virtual pages that a move has touched
        self.state = np.zeros(plan.num_pages - plan.min_page, dtype=np.uint8)  # by rank
        self.start = self.end = self.holes = self.pending = self.pages_moved = 0

    @property
    def ranks(self) -> int:
        """Pages that the span could use if it had the buffer for itself."""
        return len(self.state)

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def live(self) -> int:
        return self.length - self.holes - self.pending

    def bytes_of(self, reach: Reach) -> tuple[int, int]:
        """The bytes [low, high) of ranks [start, end)."""
        start, end = reach
        first, last = (self.plan.num_pages - end, self.plan.num_pages - start)
        if self.growth is not Growth.DOWN:
            first, last = self.plan.min_page + start, self.plan.min_page + end
        return first * self.page_bytes, last * self.page_bytes

    def page_of(self, rank: np.ndarray) -> np.ndarray:
        """Physical pages of ranks. The mapping is its own inverse up to the origin, see `rank_of`."""
        return self.plan.num_pages - 1 - rank if self.growth is Growth.DOWN else self.plan.min_page + rank

    def rank_of(self, page: np.ndarray) -> np.ndarray:
        return self.plan.num_pages - 1 - page if self.growth is Growth.DOWN else page - self.plan.min_page

    def fresh(self, want: int) -> int:
        """Pages that must come from past the boundaries when `want` are bound: holes are filled first."""
        return max(0, want - self.holes)

    def bind(self, virtual: Sequence[int], reach: Reach) -> None:
        """Bind and clear pages: holes farthest from the boundaries first, then all ranks that `reach` adds."""
        start, end = reach
        if self.length:
            fresh = np.concatenate((np.arange(start, self.start), np.arange(self.end, end)))
        else:
            fresh = np.arange(start, end)
        ranks = np.concatenate((self._holes()[: len(virtual) - len(fresh)], fresh))
        if len(ranks) != len(virtual):
            raise InvariantError(f"{self.kind}: ranks {len(ranks)} != pages to bind {len(virtual)}")
        self.state[ranks] = LIVE
        self.holes -= len(ranks) - len(fresh)
        self.start, self.end = start, end
        pages = self.page_of(ranks)
        self.map.set(virtual, pages)
        self.owner[pages] = virtual
        self.relocated[virtual] = False
        self.pool.zero_pages(self.kind, upload(pages, self.pool.device))

    def unbind(self, virtual: Sequence[int], written: Set[int]) -> None:
        """Turn pages into holes. Virtual pages that are not bound here (tombstones) are passed over.

        Pages of `written`, which the forward in flight writes, are pending until it ends: a survivor that
        was moved there would be written over.
        """
        bound = np.asarray(virtual)[self.map.host[virtual] > 0]
        if not len(bound):
            return
        pages = self.map.host[bound]
        self.map.set(bound, np.full(len(bound), UNMAPPED))
        self.owner[pages] = UNMAPPED
        self.relocated[bound] = False
        self._leave(self.rank_of(pages), pending=np.isin(bound, list(written)))

    def pack(self, *, keep: Set[int], forward_in_flight: bool, limit: int | None = None) -> int:
        """Move the pages nearest to the boundaries into the holes farthest from them; returns how many moved.

        `keep`: virtual pages that the forward in flight writes, which stay where they are.
        """
        near, far = self._holes(), self._in_order(LIVE)[::-1]
        if keep:
            far = far[~np.isin(self.owner[self.page_of(far)], list(keep))]
        count = min(len(near), len(far))
        # holds up to some pair and for none after it
        count = int((self._depth(far[:count]) > self._depth(near[:count])).sum())
        near, far = near[:count][:limit], far[:count][:limit]
        if len(near):
            self._move(far, near)
            self.holes -= len(near)
            self._leave(far, pending=np.full(len(far), forward_in_flight))
        self._retreat()
        return len(near)

    def shift(self, start: int) -> int:
        """Move a packed float to the ranks from `start` on, by as few pages as that takes; returns how many.

        Pages of a span are in no order, so the far boundary's pages go where the span grows: what is read and
        what is written never overlap.
        """
        if self.length != self.live:
            raise InvariantError(f"{self.kind}: live {self.live} != span {self.length}: shift needs it packed")
        now, then = np.arange(self.start, self.end), np.arange(start, start + self.length)
        sources, targets = np.setdiff1d(now, then), np.setdiff1d(then, now)
        if len(sources):
            self._move(sources, targets)
            self.state[sources] = UNUSED
            self._poison(sources)
        self.start, self.end = start, start + self.length
        return len(sources)

    def forward_done(self) -> None:
        """Pages that were moved away from, or freed under the forward, are free now."""
        if self.pending:
            ranks = np.flatnonzero(self.state == PENDING)
            self.pending = 0
            self._leave(ranks, pending=np.zeros(len(ranks), dtype=bool))

    # -- inside ----------------------------------------------------------------------------------

    def _depth(self, ranks: np.ndarray) -> np.ndarray:
        """How near the boundaries ranks are: from the anchored end, or from the middle of a float (doubled)."""
        return np.abs(2 * ranks - (self.start + self.end - 1)) if self.growth is Growth.BOTH else ranks

    def _in_order(self, state: int) -> np.ndarray:
        ranks = self.start + np.flatnonzero(self.state[self.start : self.end] == state)
        return ranks[np.argsort(self._depth(ranks), kind="stable")]

    def _holes(self) -> np.ndarray:
        return self._in_order(HOLE)

    def _leave(self, ranks: np.ndarray, pending: np.ndarray) -> None:
        """Ranks that hold nothing any more: holes, poisoned, or pending and untouched until the forward ends."""
        self.state[ranks] = np.where(pending, PENDING, HOLE)
        self.pending += int(pending.sum())
        self.holes += int((~pending).sum())
        self._poison(ranks[~pending])
        self._retreat()

    def _poison(self, ranks: np.ndarray) -> None:
        if self.pool.poison and len(ranks):
            self.pool.poison_pages(self.kind, upload(self.page_of(ranks), self.pool.device))

    def _move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Move live ranks to unused ones or holes; what becomes of the sources is the caller's."""
        pages = np.stack((self.page_of(sources), self.page_of(targets)))
        self.pool.move_pages(self.kind, *upload(pages, self.pool.device))
        virtual = self.owner[pages[0]]
        self.map.set(virtual, pages[1])
        self.owner[pages[0]] = UNMAPPED
        self.owner[pages[1]] = virtual
        self.state[targets] = LIVE
        self.relocated[virtual] = True
        self.pages_moved += len(virtual)

    def _retreat(self) -> None:
        """Give the holes at the boundaries back to the gaps."""
        if not self.length or HOLE not in (self.state[self.end - 1], self.state[self.start]):
            return
        inner = self.start + np.flatnonzero(self.state[self.start : self.end] != HOLE)
        start, end = (int(inner[0]), int(inner[-1]) + 1) if len(inner) else (0, 0)
        if self.growth is not Growth.BOTH:
            start = 0
        kept = self.state[start:end].copy()
        self.state[self.start : self.end] = UNUSED
        self.state[start:end] = kept
        self.holes -= self.length - len(kept)
        self.start, self.end = start, end

    def check(self) -> None:
        """Raise InvariantError with the equation that broke."""
        bound = np.flatnonzero(self.map.host[:-1] > 0)
        live = len(bound)
        if live + self.holes + self.pending != self.length:
            raise InvariantError(
                f"{self.kind}: live {live} + holes {self.holes} + pending {self.pending} != span {self.length}"
            )
        counts = {name: int((self.state == value).sum()) for name, value in (("holes", HOLE), ("pending", PENDING))}
        outside = self.state[: self.start].any() or self.state[self.end :].any()
        if counts != {"holes": self.holes, "pending": self.pending} or outside:
            raise InvariantError(f"{self.kind}: counted {counts}, kept holes {self.holes}, pending {self.pending}")
        back = self.owner[self.map.host[bound]]
        if not np.array_equal(back, bound):
            at = int(np.flatnonzero(back != bound)[0])
            raise InvariantError(f"{self.kind}: v2p[{bound[at]}] = {self.map.host[bound[at]]}, p2v of it = {back[at]}")
        if owned := int((self.owner != UNMAPPED).sum()) - live:
            raise InvariantError(f"{self.kind}: {owned} physical pages are owned by no bound virtual page")
        if not (self.state[self.rank_of(self.map.host[bound])] == LIVE).all():
            raise InvariantError(f"{self.kind}: a bound page is not live")
        if not torch.equal(self.map.device.cpu(), torch.from_numpy(self.map.host)):
            raise InvariantError(f"{self.kind}: the page map on the device differs from the host's")
