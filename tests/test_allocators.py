"""Allocators against a plain Python model: random interleavings, both pool modes, every byte stamped.

Each live page is stamped with its virtual number in every layer's rows, so a lost, doubled or
misplaced move shows as a wrong stamp and not as a plausible map.
"""

import contextlib

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from suite.errors import InputError, InvariantError, OutOfPagesError
from suite.kernels.ids import KVKind
from tests.tiny import allocator as allocator_of
from tests.tiny import geometry


def physical_rows(allocator, kind: KVKind, page: int) -> slice | None:
    """Where the rows of virtual `page` lie in a layer's view, derived apart from the translator; None if unmapped."""
    page_map = allocator.page_map(kind)
    at = page if page_map is None else int(page_map[page])
    if at < 0:
        return None
    first = at * allocator.pool.page_multiplier(kind) * allocator.page_size
    return slice(first, first + allocator.page_size)


class AllocatorMachine(RuleBasedStateMachine):
    """live: virtual page -> does it still have its window rows. The books of a careful clerk."""

    @initialize(
        mode=st.sampled_from(["static", "unified", "unified_token_major"]),
        shape=st.sampled_from([(4, 2, 3), (4, 3, 1), (1, 2, 2), (4, 2, 0)]),
        eager=st.booleans(),
    )
    def setup(self, mode, shape, eager):
        self.allocator = allocator_of(mode, geometry(*shape), eager=eager)
        self.eager = eager and mode != "static"
        self.held: contextlib.ExitStack | None = None
        self.places: dict[int, list[int]] = {}
        self.unified = mode != "static"
        self.live: dict[int, bool] = {}
        self.forward = False
        self.written: set[int] = set()

    def stamp(self, pages):
        for page in pages:
            for pool in self.allocator.pool.geometry.pools:
                for layer in pool.layers:
                    rows = physical_rows(self.allocator, pool.kind, page)
                    assert not self.allocator.pool.k_view(layer)[rows].any(), "a freshly bound page is not clear"
                    self.allocator.pool.k_view(layer)[rows] = page + 1000 * layer
                    self.allocator.pool.v_view(layer)[rows] = -page - 1000 * layer

    @rule(count=st.integers(0, 9))
    def alloc(self, count):
        available = self.allocator.available_pages()
        before = self.allocator.mutations
        if self.forward and self.unified and self.allocator.capacity_pages() < count <= available:
            self.forward = False  # an urgent compaction waits for the forward
        try:
            pages = self.allocator.alloc(count)
        except OutOfPagesError:
            assert count > available
            assert self.allocator.mutations == before
            return
        assert count <= available
        assert len(set(pages)) == count
        assert not set(pages) & set(self.live)
        assert 0 not in pages
        self.stamp(pages)
        self.live |= dict.fromkeys(pages, True)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data):
        pages = data.draw(st.lists(st.sampled_from(sorted(self.live)), unique=True, max_size=6))
        self.allocator.free(pages)
        self.packed_eagerly(pages)
        for page in pages:
            del self.live[page]
            self.places.pop(page, None)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def evict(self, data):
        pages = data.draw(st.lists(st.sampled_from(sorted(self.live)), unique=True, max_size=6))
        self.allocator.evict_window(pages)
        if self.allocator.pool.geometry.window is not None:
            self.packed_eagerly(pages)
        self.live |= dict.fromkeys(pages, False)

    @precondition(lambda self: self.unified and not self.forward)
    @rule(data=st.data())
    def begin_forward(self, data):
        pool = sorted(self.live)
        self.written = set(data.draw(st.lists(st.sampled_from(pool), unique=True))) if pool else set()
        self.allocator.begin_forward(sorted(self.written))
        self.forward = True

    @precondition(lambda self: self.unified and self.forward)
    @rule()
    def end_forward(self):
        self.allocator.end_forward()
        self.forward = False

    @precondition(lambda self: self.unified)
    @rule(urgent=st.booleans())
    def compact(self, urgent):
        held = {
            (kind, page): int(self.allocator.page_map(kind)[page])
            for kind in (pool.kind for pool in self.allocator.pool.geometry.pools)
            for page in self.written & set(self.live)
        }
        moved = self.allocator.compact(urgent=urgent)
        if self.held:
            assert moved == 0, "moved a page while moves were held"
            return
        if urgent:
            self.forward = False
        if self.forward:
            for (kind, page), at in held.items():
                assert int(self.allocator.page_map(kind)[page]) == at, "moved a page that the forward writes"
        else:
            assert not any(span.holes for span in self.allocator.spans), "packing left a hole"

    @precondition(lambda self: not self.held)
    @rule()
    def hold_moves(self):
        self.held = contextlib.ExitStack()
        self.held.enter_context(self.allocator.hold_moves())
        self.places = {page: self.where(page) for page in self.live}

    @precondition(lambda self: self.held)
    @rule()
    def let_moves_go(self):
        self.held.close()
        self.held = None

    def where(self, page):
        return [physical_rows(self.allocator, pool.kind, page) for pool in self.allocator.pool.geometry.pools]

    def packed_eagerly(self, pages):
        """An eager allocator has packed by now, for which it waited for the forward in flight."""
        if self.eager and pages and not self.held:
            self.forward = False
            assert not any(span.holes for span in self.allocator.spans)

    @invariant()
    def nothing_moves_while_moves_are_held(self):
        if hasattr(self, "allocator") and self.held:
            for page in set(self.places) & set(self.live):
                now = self.where(page)
                assert all(a == b or b is None for a, b in zip(self.places[page], now, strict=True))

    @invariant()
    def books_balance(self):
        if not hasattr(self, "allocator"):
            return
        self.allocator.check()
        assert self.allocator.live_pages(KVKind.FULL) == len(self.live)
        if self.allocator.pool.geometry.window is not None:
            assert self.allocator.live_pages(KVKind.WINDOW) == sum(self.live.values())

    @invariant()
    def every_live_page_holds_its_stamp(self):
        if not hasattr(self, "allocator"):
            return
        for page, has_window in self.live.items():
            for pool in self.allocator.pool.geometry.pools:
                rows = physical_rows(self.allocator, pool.kind, page)
                if pool.kind is KVKind.WINDOW and not has_window:
                    assert rows is None
                    continue
                for layer in pool.layers:
                    assert (self.allocator.pool.k_view(layer)[rows] == page + 1000 * layer).all()
                    assert (self.allocator.pool.v_view(layer)[rows] == -page - 1000 * layer).all()

    @invariant()
    def sink_is_finite(self):
        if hasattr(self, "allocator"):
            for pool in self.allocator.pool.geometry.pools:
                for layer in pool.layers:
                    assert self.allocator.pool.k_view(layer)[: self.allocator.page_size].isfinite().all()


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_joint_capacity_is_one_number():
    # room for pages in each pool alone, but the same bytes cannot serve both
    allocator = allocator_of("unified", geometry())
    pages = allocator.alloc(allocator.available_pages())
    assert allocator.available_pages() == 0
    allocator.evict_window(pages[:6])
    freed = 6 * allocator.window.page_bytes
    both = allocator.window.page_bytes + allocator.full.page_bytes
    slack = allocator.gap_bytes()
    assert allocator.available_pages() == (freed + slack) // both
    got = allocator.alloc(allocator.available_pages())
    allocator.check()
    with pytest.raises(OutOfPagesError, match="asked for 1 pages, 0 available"):
        allocator.alloc(1)
    allocator.free(got)
    allocator.check()


def test_double_free_and_sink_free_are_named():
    for mode in ("static", "unified"):
        allocator = allocator_of(mode, geometry())
        pages = allocator.alloc(3)
        allocator.free(pages[:1])
        for bad in (pages[0], 0, 10_000):
            with pytest.raises(InvariantError, match=f"page {bad} is not live"):
                allocator.free([bad])
        with pytest.raises(InvariantError, match="named twice"):
            allocator.free([pages[1], pages[1]])
        with pytest.raises(InputError, match="count: got -1"):
            allocator.alloc(-1)


def test_integrity_check_prints_the_equation():
    allocator = allocator_of("unified", geometry())
    allocator.alloc(5)
    allocator.full.holes += 1
    with pytest.raises(InvariantError, match=r"full: live 5 \+ holes 1 \+ pending 0 != span 5"):
        allocator.check()


def test_moves_follow_free_and_leave_freed_bytes_poisoned():
    allocator = allocator_of("unified", geometry())
    pages = allocator.alloc(8)
    before = allocator.page_map(KVKind.FULL).clone()
    allocator.free(pages[:4])
    assert allocator.compact() == 8  # four pages in each of two spans
    moved = allocator.page_map(KVKind.FULL)[pages[4:]] != before[pages[4:]]
    assert moved.all()
    assert allocator.pages_moved == 8
    free_row = int(allocator.full.page_of(allocator.full.length)) * allocator.pool.page_multiplier(KVKind.FULL) * 4
    assert allocator.pool.k_view(0)[free_row].isnan().all()


def test_host_and_device_maps_agree():
    allocator = allocator_of("unified", geometry())
    allocator.alloc(7)
    assert np.array_equal(allocator.full.map.host, allocator.page_map(KVKind.FULL).numpy())


def test_integrity_check_sees_a_leaked_window_page_and_a_spoilt_free_list():
    leaky = allocator_of("unified", geometry())
    page = leaky.alloc(3)[0]
    leaky.full.unbind([page], frozenset())
    leaky.free_virtual.put([page])
    with pytest.raises(InvariantError, match=f"window: free virtual page {page} is bound"):
        leaky.check()
    for mode in ("static", "unified"):
        allocator = allocator_of(mode, geometry())
        allocator.free_virtual.put([5])
        with pytest.raises(InvariantError, match=r"virtual: free pages (\d+) != distinct free pages (?!\1)\d+"):
            allocator.check()
        allocator = allocator_of(mode, geometry())
        allocator.free_virtual.put([0])
        with pytest.raises(InvariantError, match="virtual: the sink, page 0, is in the free list"):
            allocator.check()


@pytest.mark.parametrize("give_back", ["free", "evict_window"])
def test_a_page_that_the_forward_in_flight_writes_is_no_target_of_a_move(give_back):
    allocator = allocator_of("unified", geometry())
    pages = allocator.alloc(8)
    target = int(allocator.page_map(KVKind.WINDOW)[pages[0]])
    allocator.begin_forward(pages[:1])
    getattr(allocator, give_back)(pages[:2])
    assert allocator.compact() == (2 if give_back == "free" else 1)  # into the other page's holes only
    assert target not in allocator.page_map(KVKind.WINDOW).tolist()
    available = allocator.available_pages()
    allocator.check()
    allocator.end_forward()
    assert allocator.compact() == (2 if give_back == "free" else 1)
    assert target in allocator.page_map(KVKind.WINDOW).tolist()
    assert allocator.available_pages() == available  # what was pending counted already
    allocator.check()


@pytest.mark.parametrize("shape", [(4, 2, 3), (1, 3, 1), (16, 1, 1), (4, 2, 0)])
@pytest.mark.parametrize("mode", ["static", "unified"])
def test_most_pages_is_what_an_empty_allocator_gives(mode, shape):
    allocator = allocator_of(mode, geometry(*shape))
    most = allocator.most_pages()
    assert most == allocator.available_pages() > 0
    allocator.alloc(2)
    assert allocator.most_pages() == most


@pytest.mark.parametrize("mode", ["unified", "unified_token_major"])
def test_held_moves_make_no_room(mode):
    """Holes that only packing could join are no room while moves are held; nothing is taken, nothing overlaps."""
    allocator = allocator_of(mode, geometry())
    pages = allocator.alloc(allocator.available_pages())
    allocator.evict_window(pages[::2])  # window holes: room for joint pages only once they are packed away
    packed = allocator.available_pages()
    with allocator.hold_moves():
        now = allocator.available_pages()
        assert now == allocator.capacity_pages() < packed
        with pytest.raises(OutOfPagesError, match=f"asked for {packed} pages, {now} available"):
            allocator.alloc(packed)
        allocator.check()
    assert len(allocator.alloc(packed)) == packed
    allocator.check()
