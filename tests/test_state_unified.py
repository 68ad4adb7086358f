"""State slots among the pages of the unified buffer: shared bytes, moves, pins, exports, and a poisoned boot."""

import random

import pytest
import torch

from suite.errors import InputError, InvariantError, OutOfPagesError, PoolTooSmallError
from suite.kernels.geometry import RunnerGeometry
from suite.kernels.ids import KVKind
from suite.kernels.pools.layout import plan_buffer
from suite.kernels.pools.state import StateGeometry, VirtualSlots
from tests.pool_rig import COMPOSITIONS, LARGE_STATE, MODES, build, rows, stamp, wrongly_stamped

UNIFIED = pytest.mark.parametrize("mode", ["unified", "unified_token_major"])
TRI = COMPOSITIONS["state + window + full"]


@UNIFIED
def test_slots_and_pages_share_their_bytes(mode):
    allocator = build(mode, TRI)
    room, slots = allocator.available_pages(), allocator.slots.available_slots()
    assert allocator.most_pages() < room, "one request also has a state"
    assert not allocator.fits(pages=room, slots=1)
    held = allocator.slots.alloc(slots)
    assert allocator.available_pages() < room
    assert allocator.bytes_in_use()["state"] == slots * TRI.state.slot_bytes
    allocator.slots.free(held)
    assert (allocator.available_pages(), allocator.slots.available_slots()) == (room, slots)
    pages = allocator.alloc(room)
    assert allocator.slots.available_slots() < slots
    with pytest.raises(OutOfPagesError, match=f"asked for {slots} state slots"):
        allocator.slots.alloc(slots)
    allocator.free(pages)
    allocator.check()


@UNIFIED
def test_the_window_makes_room_for_slots_and_everybody_keeps_what_is_theirs(mode):
    allocator = build(mode, TRI, slots=10)
    pages = allocator.alloc(6)
    for page in pages:
        for kind in KVKind:
            stamp(allocator, kind, page, rows(allocator, kind, page))
    before = {page: rows(allocator, KVKind.WINDOW, page) for page in pages}
    (first,) = allocator.slots.alloc(1)
    for stream in allocator.pool.state.streams():
        stream[:, int(allocator.slots.slot_map[first])] = 5
    rest = allocator.slots.alloc(allocator.slots.available_slots())
    assert allocator.window.pages_moved > 0
    assert {page: rows(allocator, KVKind.WINDOW, page) for page in pages} != before
    allocator.check()
    for kind in KVKind:
        assert not wrongly_stamped(allocator, kind, {page: rows(allocator, kind, page) for page in pages})
    kept = allocator.slots.snapshot(first, 3) if allocator.slots.available_slots() else None
    assert kept is None, "every slot was taken"
    allocator.slots.free(rest[::2])
    kept = allocator.slots.snapshot(rest[1], 3)
    allocator.slots.free([first])
    allocator.compact()
    assert allocator.slots.relocated([kept.slot, *rest[1::2]]) > 0
    allocator.check()


def test_a_forward_in_flight_pins_its_slots():
    allocator = build("unified", COMPOSITIONS["state + full"])
    slots = allocator.slots.alloc(4)
    places = allocator.slots.slot_map[slots].tolist()
    allocator.begin_forward([])  # names no slots: it may write every one
    allocator.slots.free(slots[:1])
    assert allocator.compact() == 0
    assert allocator.slots.slot_map[slots].tolist() == [-1, *places[1:]]
    allocator.end_forward()
    allocator.begin_forward([], slots[3:])
    assert allocator.compact() == 1
    assert allocator.slots.slot_map[slots].tolist() == [-1, places[1], places[0], places[3]]
    allocator.end_forward()
    assert allocator.compact() == 1
    allocator.begin_forward([], slots[1:2])
    allocator.slots.free(slots[1:2])
    assert allocator.compact() == 0, "moved a survivor to where the forward still writes"
    allocator.end_forward()
    assert allocator.compact() == 1
    allocator.check()


@pytest.mark.parametrize("mode", MODES)
def test_export_of_shared_pages_and_slots_after_moves(mode):
    allocator = build(mode, TRI)
    pages, slots = allocator.alloc(6), allocator.slots.alloc(4)
    allocator.share(pages[3:])
    allocator.free(pages)
    allocator.slots.free(slots[:2])
    allocator.compact()
    if mode != "static":
        with pytest.raises(InvariantError, match="export_slots: moves held False != True"):
            allocator.slots.export_slots(slots[2:])
    with allocator.hold_moves():
        got = allocator.slots.export_slots(slots[2:]).tensor
        with pytest.raises(InvariantError, match=f"slot {slots[0]} is neither live nor kept"):
            allocator.slots.export_slots(slots[:1])
    assert got.tolist() == allocator.slots.slot_map[slots[2:]].tolist()
    assert (got.tolist() != slots[2:]) == (mode != "static")
    assert [allocator.holders(page) for page in pages] == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["window + full", "state + window + full", "state + full, fused draft", "MLA"])
def test_a_poisoned_boot_ends_like_a_clean_one(mode, name):
    """The same calls on both: the same maps, and the same bytes wherever somebody has written."""
    both = [build(mode, COMPOSITIONS[name], poison=poison) for poison in (True, False)]
    for allocator in both:
        dice, live, slots = random.Random(7), [], []
        for step in range(40):
            got = allocator.alloc(dice.randint(0, allocator.available_pages()))
            for page in got:
                for part in allocator.pool.geometry.pools:
                    stamp(allocator, part.kind, page, rows(allocator, part.kind, page))
            live += got
            if allocator.slots is not None:
                slots += allocator.slots.alloc(dice.randint(0, allocator.slots.available_slots()))
                for slot in slots:
                    for stream in allocator.pool.state.streams():
                        stream[:, int(allocator.slots.slot_map[slot])] = slot + step % 3
            dice.shuffle(live)
            dice.shuffle(slots)
            cut, gone = dice.randint(0, len(live)), dice.randint(0, len(slots))
            allocator.evict_window(live[:3])
            allocator.free(live[cut:])
            del live[cut:]
            if slots:
                allocator.slots.free(slots[gone:])
                del slots[gone:]
            allocator.compact()
        allocator.check()
    poisoned, clean = both
    assert poisoned.pages_moved == clean.pages_moved
    for part in poisoned.pool.geometry.pools:
        places = {page: where for page in live if (where := rows(clean, part.kind, page)) is not None}
        assert all(rows(poisoned, part.kind, page) == places.get(page) for page in live)
        assert not wrongly_stamped(clean, part.kind, places)
        assert not wrongly_stamped(poisoned, part.kind, places)
    for slot in slots:
        at = [allocator.slots.kernel_slots(VirtualSlots(torch.tensor([slot]))).tensor for allocator in both]
        assert at[0] == at[1]
        for a, b in zip(poisoned.pool.state.streams(), clean.pool.state.streams(), strict=True):
            assert torch.equal(a[:, at[0]], b[:, at[1]])


def test_a_slot_lies_where_the_byte_law_says():
    """Slot s is the bytes from s * slot_bytes on, whatever pages lie beside it."""
    for name in ("state + full", "small state + window + full"):
        pool = build("unified", COMPOSITIONS[name], poison=False).pool
        size = pool.geometry.state.slot_bytes
        assert pool.state.slots == pool.buffer_bytes // size - 1
        for slot in (pool.spans["state"].min_page, pool.state.slots):
            for stream in pool.state.streams():
                stream[:, slot] = 1
            used = torch.nonzero(pool._storage).flatten()
            assert slot * size <= int(used[0])
            assert int(used[-1]) < (slot + 1) * size
            assert len(used) == size - pool._storage[slot * size : (slot + 1) * size].eq(0).sum()
            pool._storage.zero_()


def test_bad_state_is_named():
    full = COMPOSITIONS["full"].full
    odd = StateGeometry(layers=(20,), conv_dim=0, v_heads=1, v_dim=1, k_dim=3)
    with pytest.raises(InputError, match=r"state\.slot_bytes: got 12, expected a multiple of 8"):
        plan_buffer(RunnerGeometry(full=full, state=odd), "unified", 1 << 20, 8)
    with pytest.raises(PoolTooSmallError, match="for the sink, 3 state slots and one request of 8 tokens"):
        plan_buffer(RunnerGeometry(full=full, state=LARGE_STATE), "unified", 8192, 8)
    with pytest.raises(InputError, match="slots: got -1"):
        build("static", RunnerGeometry(full=full, state=LARGE_STATE), slots=-1)
