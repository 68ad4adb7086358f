"""One sub-pool's end of the unified buffer, and how its pages are packed.

A span grows from one end of the buffer: the window sub-pool up, the full one down. Inside, pages
are counted by *rank* from the span's own end, so that both directions share every line below:
rank 0 is the page nearest the own end, `length` ranks are in use, and ranks are live, holes, or
pending (a page that was moved away from while the forward in flight may still read it).
"""

from collections.abc import Set

import numpy as np
import torch

from suite.errors import InvariantError
from suite.kernels.allocators.paged import UNMAPPED, PageMap, upload
from suite.kernels.geometry import SpanPlan
from suite.kernels.ids import KVKind
from suite.kernels.pools.unified import UnifiedPool


class Span:
    """Live pages, holes and the boundary of one sub-pool."""

    def __init__(self, pool: UnifiedPool, plan: SpanPlan, *, grows_up: bool, virtual_pages: int) -> None:
        self.pool, self.plan, self.grows_up = pool, plan, grows_up
        self.kind: KVKind = plan.geometry.kind
        self.page_bytes = plan.geometry.page_bytes
        self.map = PageMap(virtual_pages, pool.device)
        self.owner = np.full(plan.num_pages, UNMAPPED, dtype=np.int64)  # physical page -> virtual page
        self.relocated = np.zeros(virtual_pages, dtype=bool)  # live virtual pages that a move has touched
        self.length = 0
        self.holes: set[int] = set()
        self.pending: set[int] = set()
        self.pages_moved = 0

    @property
    def live(self) -> int:
        return self.length - len(self.holes) - len(self.pending)

    @property
    def frontier_byte(self) -> int:
        """The first byte past the span, on the side it grows to."""
        if self.grows_up:
            return (self.plan.min_page + self.length) * self.page_bytes
        return (self.plan.num_pages - self.length) * self.page_bytes

    def page_of(self, rank: int) -> int:
        return self.plan.min_page + rank if self.grows_up else self.plan.num_pages - 1 - rank

    def rank_of(self, page: int) -> int:
        return page - self.plan.min_page if self.grows_up else self.plan.num_pages - 1 - page

    def bind(self, virtual: list[int]) -> None:
        """Bind and clear pages: holes nearest the own end first, then past the frontier. The caller knows the room."""
        reused = sorted(self.holes)[: len(virtual)]
        self.holes.difference_update(reused)
        fresh = range(self.length, self.length + len(virtual) - len(reused))
        self.length += len(fresh)
        pages = [self.page_of(rank) for rank in (*reused, *fresh)]
        self.map.set(virtual, pages)
        self.owner[pages] = virtual
        self.relocated[virtual] = False
        self.pool.zero_pages(self.kind, upload([pages], self.pool.device)[0])

    def unbind(self, virtual: list[int]) -> None:
        """Turn pages into holes. Virtual pages that are not bound here (tombstones) are passed over."""
        bound = [page for page in virtual if self.map.host[page] > 0]
        if not bound:
            return
        pages = self.map.host[bound].tolist()
        self.map.set(bound, [UNMAPPED] * len(bound))
        self.owner[pages] = UNMAPPED
        self.relocated[bound] = False
        self.pool.poison_pages(self.kind, upload([pages], self.pool.device)[0])
        self.holes.update(self.rank_of(page) for page in pages)
        self._retreat()

    def pack(self, *, keep: Set[int], forward_in_flight: bool, limit: int | None = None) -> int:
        """Move the pages farthest from the own end into the holes nearest to it; returns how many moved.

        `keep`: virtual pages that the forward in flight writes, which stay where they are.
        """
        movable = [
            rank
            for rank in range(self.length - 1, -1, -1)
            if (owner := int(self.owner[self.page_of(rank)])) != UNMAPPED and owner not in keep
        ]
        moves = [(far, near) for far, near in zip(movable, sorted(self.holes), strict=False) if far > near][:limit]
        if moves:
            self._move([self.page_of(far) for far, _ in moves], [self.page_of(near) for _, near in moves])
            self.holes.difference_update(near for _, near in moves)
            (self.pending if forward_in_flight else self.holes).update(far for far, _ in moves)
        self._retreat()
        return len(moves)

    def forward_done(self) -> None:
        """Pages that were moved away from are free now."""
        self.holes |= self.pending
        self.pending.clear()
        self._retreat()

    def _move(self, sources: list[int], targets: list[int]) -> None:
        virtual = self.owner[sources].tolist()
        moved = upload([sources, targets], self.pool.device)
        self.pool.move_pages(self.kind, moved[0], moved[1])
        self.pool.poison_pages(self.kind, moved[0])
        self.map.set(virtual, targets)
        self.owner[sources] = UNMAPPED
        self.owner[targets] = virtual
        self.relocated[virtual] = True
        self.pages_moved += len(sources)

    def _retreat(self) -> None:
        while self.length and (self.length - 1) in self.holes:
            self.length -= 1
            self.holes.discard(self.length)

    def check(self) -> None:
        """Raise InvariantError with the equation that broke."""
        bound = np.flatnonzero(self.map.host[:-1] > 0)
        live, holes, pending = len(bound), len(self.holes), len(self.pending)
        if live + holes + pending != self.length:
            raise InvariantError(f"{self.kind}: live {live} + holes {holes} + pending {pending} != span {self.length}")
        back = self.owner[self.map.host[bound]]
        if not np.array_equal(back, bound):
            at = int(np.flatnonzero(back != bound)[0])
            raise InvariantError(f"{self.kind}: v2p[{bound[at]}] = {self.map.host[bound[at]]}, p2v of it = {back[at]}")
        if owned := int((self.owner != UNMAPPED).sum()) - live:
            raise InvariantError(f"{self.kind}: {owned} physical pages are owned by no bound virtual page")
        ranks = {self.rank_of(int(page)) for page in self.map.host[bound]}
        if outside := [rank for rank in (ranks | self.holes | self.pending) if not 0 <= rank < self.length]:
            raise InvariantError(f"{self.kind}: ranks {sorted(outside)} lie outside the span of {self.length}")
        if not torch.equal(self.map.device.cpu(), torch.from_numpy(self.map.host)):
            raise InvariantError(f"{self.kind}: the page map on the device differs from the host's")
