"""The allocator of the unified pool: a full sub-pool that grows down and a window one that grows up.

A virtual page is bound in both at once, so what can be had is one joint number, not the smaller
of two. Moves are lazy: holes wait until somebody needs the room or a quiescent point comes.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from suite.errors import InvariantError
from suite.kernels.allocators.multi_ended import Span
from suite.kernels.allocators.paged import PageAllocator
from suite.kernels.ids import KVKind
from suite.kernels.pools.unified import UnifiedPool

LAZY_MOVE_LIMIT = 4096  # pages per sub-pool that one quiescent point may move


class UnifiedAllocator(PageAllocator):
    """`wait_for_forward` is called before an urgent compaction while a forward is in flight.

    With `eager`, every free packs at once instead of leaving holes: simpler to reason about, and slower.
    """

    pool: UnifiedPool

    def __init__(
        self, pool: UnifiedPool, *, wait_for_forward: Callable[[], None] | None = None, eager: bool = False
    ) -> None:
        plan = pool.spans[KVKind.FULL]
        super().__init__(pool, plan.num_pages)
        self.full = Span(pool, plan, grows_up=False, virtual_pages=self.virtual_pages)
        self.window: Span | None = None
        if pool.geometry.window is not None:
            self.window = Span(pool, pool.spans[KVKind.WINDOW], grows_up=True, virtual_pages=self.virtual_pages)
        self.spans = (self.full,) if self.window is None else (self.full, self.window)
        self._wait_for_forward = wait_for_forward or (lambda: None)
        self._in_flight: frozenset[int] | None = None
        self._eager, self._holds = eager, 0

    def page_map(self, kind: KVKind) -> torch.Tensor:
        return self._span(kind).map.device

    def live_pages(self, kind: KVKind) -> int:
        return self._span(kind).live

    @property
    def pages_moved(self) -> int:
        return sum(span.pages_moved for span in self.spans)

    # -- capacity --------------------------------------------------------------------------------

    def gap_bytes(self) -> int:
        """Bytes between the two frontiers."""
        low = self.pool.sink_bytes if self.window is None else self.window.frontier_byte
        return self.full.frontier_byte - low

    def capacity_pages(self) -> int:
        """Pages that can be bound right now, without a move."""
        return min(self._bindable(), len(self.free_virtual))

    def available_pages(self) -> int:
        """Pages that can be bound once every hole is packed away; pending pages count, as packing waits for them.

        While moves are held, only what needs none.
        """
        if self.moves_are_held:
            return self.capacity_pages()
        drained = sum((span.holes + span.pending) * span.page_bytes for span in self.spans)
        packed = self._joint([0] * len(self.spans), self.gap_bytes() + drained)
        return min(packed, len(self.free_virtual))

    def most_pages(self) -> int:
        first = self.pool.sink_bytes if self.window is None else self.window.plan.min_page * self.window.page_bytes
        room = self.full.plan.num_pages * self.full.page_bytes - first
        return min(self._joint([0] * len(self.spans), room), self.virtual_pages - 1)

    def _bindable(self) -> int:
        return self._joint([span.holes for span in self.spans], self.gap_bytes())

    def _joint(self, holes: list[int], gap: int) -> int:
        """Pages bindable in every span: from holes in both, then a hole beside fresh bytes, then fresh bytes alone."""
        if self.window is None:
            return holes[0] + gap // self.full.page_bytes
        both = min(holes)
        short = self.spans[holes.index(both)]
        one_sided = min(max(holes) - both, gap // short.page_bytes)
        left = gap - one_sided * short.page_bytes
        fresh = left // sum(span.page_bytes for span in self.spans) if one_sided == max(holes) - both else 0
        return both + one_sided + fresh

    # -- binding ---------------------------------------------------------------------------------

    def _bind(self, virtual: list[int]) -> None:
        if len(virtual) > self._bindable():
            self.compact(urgent=True)
        for span in self.spans:
            span.bind(virtual)

    def _unbind(self, virtual: list[int]) -> None:
        for span in self.spans:
            span.unbind(virtual, self._written)
        if self._eager:
            self.compact(urgent=True)

    def _unbind_window(self, virtual: list[int]) -> None:
        if self.window is not None:
            self.window.unbind(virtual, self._written)
            if self._eager:
                self.compact(urgent=True)

    # -- moves -----------------------------------------------------------------------------------

    def begin_forward(self, written: Sequence[int]) -> None:
        """A forward that writes into these virtual pages is in flight until `end_forward`."""
        if self._in_flight is not None:
            raise InvariantError("begin_forward: a forward is in flight already")
        self._in_flight = frozenset(written)

    def end_forward(self) -> None:
        self._in_flight = None
        for span in self.spans:
            span.forward_done()

    @property
    def moves_are_held(self) -> bool:  # type: ignore[override]
        return self._holds > 0

    @contextlib.contextmanager
    def hold_moves(self) -> Iterator[None]:
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1

    def compact(self, *, urgent: bool = False) -> int:
        """Pack every span; returns the number of pages moved.

        Lazy (the default) moves at most 4,096 pages per span and never one that the forward in flight
        writes; its sources stay unusable until that forward ends. Urgent waits for the forward first.
        Moves nothing while moves are held.
        """
        if self.moves_are_held:
            return 0
        if urgent and self._in_flight is not None:
            self._wait_for_forward()
            self.end_forward()
        limit = None if urgent else LAZY_MOVE_LIMIT
        moved = sum(
            span.pack(keep=self._written, forward_in_flight=self._in_flight is not None, limit=limit)
            for span in self.spans
        )
        if moved:
            self.mutations += 1
        return moved

    @property
    def _written(self) -> frozenset[int]:
        """Virtual pages that the forward in flight writes."""
        return self._in_flight or frozenset()

    def check(self) -> None:
        self.free_virtual.check("virtual")
        for span in self.spans:
            span.check()
            for page in np.flatnonzero(span.map.host[:-1] > 0).tolist():
                if page in self.free_virtual:
                    raise InvariantError(f"{span.kind}: free virtual page {page} is bound to {span.map.host[page]}")
        live, free = self.full.live, len(self.free_virtual)
        if live + free != self.virtual_pages - 1:
            raise InvariantError(f"virtual: free {free} + live {live} != pages {self.virtual_pages - 1}")
        if self.gap_bytes() < 0:
            raise InvariantError(
                f"full frontier {self.full.frontier_byte} - gap {self.gap_bytes()} overlaps the window span"
            )

    def _span(self, kind: KVKind) -> Span:
        for span in self.spans:
            if span.kind is kind:
                return span
        raise KeyError(f"this runner has no {kind} pool")
