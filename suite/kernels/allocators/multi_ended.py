"""One sub-pool's end of the unified buffer, and how its pages are packed.

A span grows from one end of the buffer: the window sub-pool up, the full one down. Inside, pages
are counted by *rank* from the span's own end, so that both directions share every line below:
rank 0 is the page nearest the own end, `length` ranks are in use, and each of those is live, a hole,
or pending (a page that was moved away from, or freed, while the forward in flight may still use it).
"""

from collections.abc import Set

import numpy as np
import torch

from suite.errors import InvariantError
from suite.kernels.allocators.paged import UNMAPPED, PageMap
from suite.kernels.geometry import SpanPlan
from suite.kernels.ids import KVKind
from suite.kernels.pools.unified import UnifiedPool
from suite.kernels.upload import upload

UNUSED, LIVE, HOLE, PENDING = 0, 1, 2, 3


class Span:
    """Live pages, holes and the boundary of one sub-pool."""

    def __init__(self, pool: UnifiedPool, plan: SpanPlan, *, grows_up: bool, virtual_pages: int) -> None:
        self.pool, self.plan, self.grows_up = pool, plan, grows_up
        self.kind: KVKind = plan.geometry.kind
        self.page_bytes = plan.page_bytes
        self.map = PageMap(virtual_pages, pool.device)
        self.owner = np.full(plan.num_pages, UNMAPPED, dtype=np.int64)  # physical page -> virtual page
        self.relocated = np.zeros(virtual_pages, dtype=bool)  # live virtual pages that a move has touched
        self.state = np.zeros(plan.num_pages - plan.min_page, dtype=np.uint8)  # by rank
        self.length = self.holes = self.pending = self.pages_moved = 0

    @property
    def live(self) -> int:
        return self.length - self.holes - self.pending

    @property
    def frontier_byte(self) -> int:
        """The first byte past the span, on the side it grows to."""
        if self.grows_up:
            return (self.plan.min_page + self.length) * self.page_bytes
        return (self.plan.num_pages - self.length) * self.page_bytes

    def page_of(self, rank: np.ndarray) -> np.ndarray:
        """Physical pages of ranks. The mapping is its own inverse up to the origin, see `rank_of`."""
        return self.plan.min_page + rank if self.grows_up else self.plan.num_pages - 1 - rank

    def rank_of(self, page: np.ndarray) -> np.ndarray:
        return page - self.plan.min_page if self.grows_up else self.plan.num_pages - 1 - page

    def bind(self, virtual: list[int]) -> None:
        """Bind and clear pages: holes nearest the own end first, then past the frontier. The caller knows the room."""
        reused = np.flatnonzero(self.state[: self.length] == HOLE)[: len(virtual)]
        fresh = np.arange(self.length, self.length + len(virtual) - len(reused))
        ranks = np.concatenate((reused, fresh))
        self.state[ranks] = LIVE
        self.holes -= len(reused)
        self.length += len(fresh)
        pages = self.page_of(ranks)
        self.map.set(virtual, pages)
        self.owner[pages] = virtual
        self.relocated[virtual] = False
        self.pool.zero_pages(self.kind, upload(pages, self.pool.device))

    def unbind(self, virtual: list[int], written: Set[int]) -> None:
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
        self.pool.poison_pages(self.kind, upload(pages, self.pool.device))
        pending = np.isin(bound, list(written))
        self.state[self.rank_of(pages)] = np.where(pending, PENDING, HOLE)
        self.pending += int(pending.sum())
        self.holes += int((~pending).sum())
        self._retreat()

    def pack(self, *, keep: Set[int], forward_in_flight: bool, limit: int | None = None) -> int:
        """Move the pages farthest from the own end into the holes nearest to it; returns how many moved.

        `keep`: virtual pages that the forward in flight writes, which stay where they are.
        """
        state = self.state[: self.length]
        near, far = np.flatnonzero(state == HOLE), np.flatnonzero(state == LIVE)[::-1]
        if keep:
            far = far[~np.isin(self.owner[self.page_of(far)], list(keep))]
        count = min(len(near), len(far))
        count = int((far[:count] > near[:count]).sum())  # holds up to some pair and for none after it
        near, far = near[:count][:limit], far[:count][:limit]
        if len(near):
            self._move(self.page_of(far), self.page_of(near))
            self.state[near] = LIVE
            self.state[far] = PENDING if forward_in_flight else HOLE
            if forward_in_flight:
                self.holes -= len(far)
                self.pending += len(far)
        self._retreat()
        return len(near)

    def forward_done(self) -> None:
        """Pages that were moved away from are free now."""
        if self.pending:
            self.state[self.state == PENDING] = HOLE
            self.holes, self.pending = self.holes + self.pending, 0
            self._retreat()

    def _move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        virtual = self.owner[sources]
        source, target = upload(np.stack((sources, targets)), self.pool.device)
        self.pool.move_pages(self.kind, source, target)
        self.pool.poison_pages(self.kind, source)
        self.map.set(virtual, targets)
        self.owner[sources] = UNMAPPED
        self.owner[targets] = virtual
        self.relocated[virtual] = True
        self.pages_moved += len(sources)

    def _retreat(self) -> None:
        """Give the holes at the frontier back to the gap."""
        kept = np.flatnonzero(self.state[: self.length] != HOLE)
        length = int(kept[-1]) + 1 if len(kept) else 0
        self.state[length : self.length] = UNUSED
        self.holes -= self.length - length
        self.length = length

    def check(self) -> None:
        """Raise InvariantError with the equation that broke."""
        bound = np.flatnonzero(self.map.host[:-1] > 0)
        live = len(bound)
        if live + self.holes + self.pending != self.length:
            raise InvariantError(
                f"{self.kind}: live {live} + holes {self.holes} + pending {self.pending} != span {self.length}"
            )
        counts = {name: int((self.state == value).sum()) for name, value in (("holes", HOLE), ("pending", PENDING))}
        if counts != {"holes": self.holes, "pending": self.pending} or self.state[self.length :].any():
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
