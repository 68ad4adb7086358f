"""The allocator of the unified pool: full pages grow down, window pages and state slots share the bytes below.

A virtual page is bound in every KV sub-pool at once, so what can be had is one joint number, not the smaller
of several. Moves are lazy: holes wait until somebody needs the room or a quiescent point comes.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from suite.errors import InvariantError
from suite.kernels.allocators.chain import Chain
from suite.kernels.allocators.multi_ended import Growth, Reach, Span
from suite.kernels.allocators.paged import PageAllocator
from suite.kernels.allocators.slots import SlotAllocator
from suite.kernels.geometry import STATE
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
        super().__init__(pool, pool.num_pages(KVKind.FULL))
        growth = [Growth.UP, *[Growth.BOTH] * (len(pool.spans) - 2), Growth.DOWN][-len(pool.spans) :]
        spans = {
            plan.kind: Span(pool, plan, grows, plan.num_pages if plan.kind == STATE else self.virtual_pages)
            for plan, grows in zip(pool.spans.values(), growth, strict=True)
        }
        self.chain = Chain(list(spans.values()), pool.sink_bytes, pool.buffer_bytes)
        self.full, self.window, self._state = spans[KVKind.FULL], spans.get(KVKind.WINDOW), spans.get(STATE)
        self.spans = tuple(span for span in (self.full, self.window) if span is not None)
        if pool.state is not None and self._state is not None:
            self.slots = SlotAllocator(pool.state, MovingSlots(self, self._state))
        self._wait_for_forward = wait_for_forward or (lambda: None)
        self._written: dict[str, frozenset[int]] | None = None  # virtual pages by sub-pool; None: no forward in flight
        self._eager, self._holds = eager, 0

    def page_map(self, kind: KVKind) -> torch.Tensor:
        return self._span(kind).map.device

    def live_pages(self, kind: KVKind) -> int:
        return self._span(kind).live

    @property
    def pages_moved(self) -> int:
        return sum(span.pages_moved for span in self.spans)

    # -- capacity --------------------------------------------------------------------------------

    def capacity_pages(self) -> int:
        """Pages that can be bound right now, without a move."""
        return min(self.chain.most(self.wants(pages=1), self._reachable), len(self.free_virtual))

    def available_pages(self) -> int:
        """Pages that can be bound once all is packed and floats are out of the way; packing waits for the forward.

        While moves are held, only what needs none.
        """
        return min(self.chain.most(self.wants(pages=1), self.possible), len(self.free_virtual))

    def most_pages(self) -> int:
        slot = self.wants(slots=1)

        def fits(wants: Sequence[int]) -> bool:
            return self.chain.fits([want + one for want, one in zip(wants, slot, strict=True)], empty=True)

        return min(self.chain.most(self.wants(pages=1), fits), self.virtual_pages - 1)

    def fits(self, *, pages: int, slots: int = 0) -> bool:
        ids = pages <= len(self.free_virtual) and slots <= (len(self.slots.free_virtual) if self.slots else 0)
        return ids and self.possible(self.wants(pages=pages, slots=slots))

    def wants(self, *, pages: int = 0, slots: int = 0) -> list[int]:
        """One number per span of the chain."""
        return [slots if span is self._state else pages for span in self.chain.spans]

    def possible(self, wants: Sequence[int]) -> bool:
        """Whether `wants` can be bound, by the moves that are allowed now."""
        return self._reachable(wants) if self.moves_are_held else self.chain.fits(wants)

    def _reachable(self, wants: Sequence[int]) -> bool:
        return self.chain.reach(wants) is not None

    # -- binding ---------------------------------------------------------------------------------

    def room_for(self, wants: Sequence[int]) -> list[Reach]:
        """Where to bind `wants`, which fit. Packs and shifts floats when it must, and then waits for the forward."""
        reach = self.chain.reach(wants)
        if reach is None:
            self.compact(urgent=True)
            reach = self.chain.reach(wants)
        if reach is None:
            reach = self.chain.make_room(wants)
            self._moved()
        return reach

    def packed_eagerly(self) -> None:
        if self._eager:
            self.compact(urgent=True)

    def written(self, span: Span) -> frozenset[int]:
        """Virtual pages or slots of `span` that the forward in flight writes."""
        return frozenset() if self._written is None else self._written[span.kind]

    def _bind(self, virtual: list[int]) -> None:
        reach = self.room_for(self.wants(pages=len(virtual)))
        for span, ranks in zip(self.chain.spans, reach, strict=True):
            if span is not self._state:
                span.bind(virtual, ranks)

    def _unbind(self, virtual: list[int]) -> None:
        for span in self.spans:
            span.unbind(virtual, self.written(span))
        self.packed_eagerly()

    def _unbind_window(self, virtual: list[int]) -> None:
        if self.window is not None:
            self.window.unbind(virtual, self.written(self.window))
            self.packed_eagerly()

    # -- moves -----------------------------------------------------------------------------------

    def begin_forward(self, written: Sequence[int], written_slots: Sequence[int] | None = None) -> None:
        if self._written is not None:
            raise InvariantError("begin_forward: a forward is in flight already")
        self._written = {span.kind: frozenset(written) for span in self.spans}
        if self._state is not None:
            used = np.flatnonzero(self._state.map.host[:-1] > 0).tolist() if written_slots is None else written_slots
            self._written[STATE] = frozenset(used)

    def end_forward(self) -> None:
        self._written = None
        for span in self.chain.spans:
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
        """Pack every span; returns the number of pages and slots moved.

        Lazy (the default) moves at most 4,096 pages per span and never one that the forward in flight
        writes; its sources stay unusable until that forward ends. Urgent waits for the forward first.
        Moves nothing while moves are held.
        """
        if self.moves_are_held:
            return 0
        if urgent and self._written is not None:
            self._wait_for_forward()
            self.end_forward()
        limit, in_flight = None if urgent else LAZY_MOVE_LIMIT, self._written is not None
        moved = sum(
            span.pack(keep=self.written(span), forward_in_flight=in_flight, limit=limit) for span in self.chain.spans
        )
        if moved:
            self._moved()
        return moved

    def _moved(self) -> None:
        self.mutations += 1
        if self.slots is not None:
            self.slots.mutations += 1

    def check(self) -> None:
        self.free_virtual.check("virtual")
        for span in self.chain.spans:
            span.check()
        for span in self.spans:
            for page in np.flatnonzero(span.map.host[:-1] > 0).tolist():
                if page in self.free_virtual:
                    raise InvariantError(f"{span.kind}: free virtual page {page} is bound to {span.map.host[page]}")
        self._check_holders()
        self.chain.check()

    def _span(self, kind: KVKind) -> Span:
        for span in self.spans:
            if span.kind == kind:
                return span
        raise KeyError(f"this runner has no {kind} pool")


class MovingSlots:
    """The home of state slots inside the unified buffer: a span like those of the pages."""

    def __init__(self, allocator: UnifiedAllocator, span: Span) -> None:
        self.allocator, self.span, self.map = allocator, span, span.map

    @property
    def moves_are_held(self) -> bool:
        return self.allocator.moves_are_held

    def room(self) -> int:
        return self.allocator.chain.most(self.allocator.wants(slots=1), self.allocator.possible)

    def bind(self, slots: Sequence[int]) -> None:
        reach = self.allocator.room_for(self.allocator.wants(slots=len(slots)))
        self.span.bind(slots, reach[self.allocator.chain.spans.index(self.span)])

    def unbind(self, slots: Sequence[int]) -> None:
        self.span.unbind(slots, self.allocator.written(self.span))
        self.allocator.packed_eagerly()

    def relocated(self, slots: Sequence[int]) -> int:
        return int(self.span.relocated[list(slots)].sum())
