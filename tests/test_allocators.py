"""Allocators case by case: joint capacity, sharing, moves, gates, and the checks.

Random interleavings are in `test_allocators_model.py`.
"""

import numpy as np
import pytest

from suite.errors import InputError, InvariantError, OutOfPagesError
from suite.kernels.ids import KVKind
from tests.pool_rig import COMPOSITIONS, build, rows, stamp, wrongly_stamped
from tests.tiny import allocator as allocator_of
from tests.tiny import geometry


def frontier(span):
    return span.bytes_of((span.start, span.end))


def test_joint_capacity_is_one_number():
    # room for pages in each pool alone, but the same bytes cannot serve both
    allocator = allocator_of("unified", geometry())
    pages = allocator.alloc(allocator.available_pages())
    assert allocator.available_pages() == 0
    allocator.evict_window(pages[:6])
    freed = 6 * allocator.window.page_bytes
    both = allocator.window.page_bytes + allocator.full.page_bytes
    slack = frontier(allocator.full)[0] - frontier(allocator.window)[1]
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
            with pytest.raises(InvariantError, match=f"page {bad} is not live"):
                allocator.share([bad])
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
        assert allocator.compact() == allocator.compact(urgent=True) == 0
        now = allocator.available_pages()
        assert now == allocator.capacity_pages() < packed
        with pytest.raises(OutOfPagesError, match=f"asked for {packed} pages, {now} available"):
            allocator.alloc(packed)
        allocator.check()
    assert len(allocator.alloc(packed)) == packed
    allocator.check()


@pytest.mark.parametrize("mode", ["static", "unified", "unified_token_major"])
def test_a_window_page_stays_while_one_holder_reads_it(mode):
    allocator = allocator_of(mode, geometry())
    (page,) = allocator.alloc(1)
    allocator.share([page])
    allocator.evict_window([page])
    assert allocator.has_window(page)
    assert int(allocator.page_map(KVKind.WINDOW)[page]) > 0
    allocator.free([page])  # the one that had evicted: the other still reads
    assert (allocator.holders(page), allocator.has_window(page)) == (1, True)
    allocator.share([page])
    allocator.evict_window([page])
    allocator.evict_window([page])
    assert int(allocator.page_map(KVKind.WINDOW)[page]) == -1
    allocator.share([page])  # comes after the tombstone and reads no window
    allocator.evict_window([page])
    allocator.free([page])
    allocator.free([page])
    allocator.check()
    assert (allocator.holders(page), allocator.live_pages(KVKind.FULL)) == (1, 1)
    allocator.free([page])
    with pytest.raises(InvariantError, match=f"page {page} is not live"):
        allocator.share([page])


@pytest.mark.parametrize("mode", ["static", "unified"])
def test_integrity_check_knows_the_holders(mode):
    allocator = allocator_of(mode, geometry())
    pages = allocator.alloc(3)
    allocator._window_readers[pages[1]] = 2
    with pytest.raises(InvariantError, match=f"window: page {pages[1]} has readers 2, holders 1"):
        allocator.check()
    allocator._window_readers[pages[1]] = 0
    with pytest.raises(InvariantError, match="window: bound 3 != pages with a holder 2"):
        allocator.check()
    allocator._holders[pages[1]] = 0
    with pytest.raises(InvariantError, match=r"virtual: free \d+ \+ live 2 != pages \d+"):
        allocator.check()


@pytest.mark.parametrize("mode", ["unified", "unified_token_major"])
def test_what_a_move_leaves_stays_readable_until_the_forward_ends(mode):
    """The forward in flight reads by the tables it was given: old rows hold until it ends, and are poison after."""
    allocator = build(mode, COMPOSITIONS["window + full"])
    pages = allocator.alloc(6)
    for page in pages:
        stamp(allocator, KVKind.FULL, page, rows(allocator, KVKind.FULL, page))
    old = {page: rows(allocator, KVKind.FULL, page) for page in pages}
    allocator.begin_forward([])
    allocator.free(pages[:3])
    assert allocator.compact() == 6
    kept = {page: old[page] for page in pages[3:]}
    assert all(rows(allocator, KVKind.FULL, page) != where for page, where in kept.items())
    assert not wrongly_stamped(allocator, KVKind.FULL, kept)
    assert not wrongly_stamped(allocator, KVKind.FULL, {page: rows(allocator, KVKind.FULL, page) for page in kept})
    allocator.end_forward()
    assert all(allocator.pool.k_view(0)[where].isnan().all() for where in kept.values())
    allocator.check()
