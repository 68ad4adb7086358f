"""State slots against a plain Python model: random interleavings, every byte of a slot stamped."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from suite.errors import InputError, InvariantError, OutOfPagesError
from suite.kernels.allocators.slots import SlotAllocator, Snapshot
from suite.kernels.pools.state import KernelSlots, StateGeometry, StatePool, VirtualSlots

SLOTS = 5
SHAPE = StateGeometry(layers=(0, 2), conv_dim=6, v_heads=1, v_dim=2, k_dim=3)


def allocator_of(layout: str) -> SlotAllocator:
    if layout == "static":
        return SlotAllocator(StatePool.static(SHAPE, SLOTS, "cpu", poison=True))
    buffer = torch.full((48 + (SLOTS + 1) * SHAPE.slot_bytes,), 0xFF, dtype=torch.uint8)
    return SlotAllocator(StatePool.strided(SHAPE, SLOTS, buffer, 48, poison=True))


class SlotMachine(RuleBasedStateMachine):
    """live: slot -> stamp, None while nobody wrote it; kept: snapshot -> stamp. The books of a careful clerk."""

    @initialize(layout=st.sampled_from(["static", "strided"]))
    def setup(self, layout):
        self.slots = allocator_of(layout)
        self.live: dict[int, int | None] = {}
        self.kept: dict[Snapshot, int | None] = {}
        self.clock = 0

    def rows(self, slot: int) -> torch.Tensor:
        return self.slots.kernel_slots(VirtualSlots(torch.tensor([slot]))).tensor

    def stamp_of(self, slot: int) -> int | None:
        """The one value that every element of the slot holds; None for NaN."""
        values = torch.cat([stream[:, self.rows(slot)].flatten().float() for stream in self.slots.pool.streams()])
        if values.isnan().all():
            return None
        assert (values == values[0]).all(), "a slot that is half somebody else's"
        return int(values[0])

    @rule(count=st.integers(0, 3))
    def alloc(self, count):
        free = SLOTS - len(self.live) - len(self.kept)
        before = self.slots.mutations
        try:
            got = self.slots.alloc(count)
        except OutOfPagesError:
            assert count > free
            assert self.slots.mutations == before
            return
        assert count == len(set(got)) <= free
        assert 0 not in got
        assert not set(got) & {*self.live, *(snapshot.slot for snapshot in self.kept)}
        self.live |= dict.fromkeys(got)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def write(self, data):
        slot = data.draw(st.sampled_from(sorted(self.live)))
        self.clock = self.clock % 200 + 1  # a bf16 window holds it exactly
        for stream in self.slots.pool.streams():
            stream[:, self.rows(slot)] = self.clock
        self.live[slot] = self.clock

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data):
        gone = data.draw(st.lists(st.sampled_from(sorted(self.live)), unique=True, max_size=3))
        self.slots.free(gone)
        for slot in gone:
            del self.live[slot]
            assert int(self.rows(slot)) == -1

    @precondition(lambda self: self.live)
    @rule(data=st.data(), position=st.integers(1, 99), reserve=st.booleans())
    def keep(self, data, position, reserve):
        slot = data.draw(st.sampled_from(sorted(self.live)))
        full = len(self.live) + len(self.kept) == SLOTS
        try:
            kept = self.slots.reserve_snapshot(position) if reserve else self.slots.snapshot(slot, position)
        except OutOfPagesError:
            assert full
            return
        assert not full
        assert kept.position == position
        self.kept[kept] = None if reserve else self.live[slot]

    @precondition(lambda self: self.live and self.kept)
    @rule(data=st.data())
    def restore(self, data):
        snapshot = data.draw(st.sampled_from(sorted(self.kept, key=lambda kept: kept.slot)))
        slot = data.draw(st.sampled_from(sorted(self.live)))
        assert self.slots.restore(snapshot, slot) == snapshot.position
        self.live[slot] = self.kept[snapshot]

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def drop(self, data):
        snapshot = data.draw(st.sampled_from(sorted(self.kept, key=lambda kept: kept.slot)))
        self.slots.drop(snapshot)
        del self.kept[snapshot]

    @invariant()
    def books_balance(self):
        if not hasattr(self, "slots"):
            return
        self.slots.check()
        assert self.slots.live_slots() == len(self.live)
        assert self.slots.available_slots() == SLOTS - len(self.live) - len(self.kept)
        assert self.slots.bytes_in_use() == (len(self.live) + len(self.kept)) * SHAPE.slot_bytes
        assert torch.equal(self.slots.slot_map, torch.from_numpy(self.slots.home.map.host))

    @invariant()
    def every_slot_holds_its_stamp(self):
        if not hasattr(self, "slots"):
            return
        for slot, stamp in self.live.items():
            assert self.stamp_of(slot) == stamp
        for snapshot, stamp in self.kept.items():
            assert self.stamp_of(snapshot.slot) == stamp
        assert not any(stream[:, 0].any() for stream in self.slots.pool.streams()), "padding was handed out"


TestSlots = SlotMachine.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_translation():
    slots = allocator_of("static")
    one, other = slots.alloc(2)
    slots.free([one])
    got = slots.kernel_slots(VirtualSlots(torch.tensor([other, one, 0, -1])))
    assert isinstance(got, KernelSlots)
    assert got.tensor.tolist() == [other, -1, 0, -1]
    with pytest.raises(TypeError, match="kernel_slots: needs VirtualSlots, got KernelSlots"):
        slots.kernel_slots(got)


def test_misuse_is_named():
    slots = allocator_of("static")
    one, other = slots.alloc(2)
    kept = slots.snapshot(one, 7)
    slots.free([other])
    for bad in (other, 0, 99, kept.slot):
        with pytest.raises(InvariantError, match=f"slot {bad} is not live"):
            slots.free([bad])
    with pytest.raises(InvariantError, match="named twice"):
        slots.free([one, one])
    with pytest.raises(InputError, match="position: got 0"):
        slots.snapshot(one, 0)
    with pytest.raises(InputError, match="count: got -1"):
        slots.alloc(-1)
    with pytest.raises(OutOfPagesError, match="asked for 4 state slots, 3 available"):
        slots.alloc(4)
    slots.drop(kept)
    with pytest.raises(InvariantError, match="is not kept"):
        slots.restore(kept, one)
    with pytest.raises(InvariantError, match="is not kept"):
        slots.drop(kept)


def test_integrity_check_prints_the_equation():
    slots = allocator_of("static")
    slots.alloc(2)
    slots._live.add(5)
    with pytest.raises(InvariantError, match=r"state: free 3 \+ live 3 \+ snapshots 0 != slots 5"):
        slots.check()
