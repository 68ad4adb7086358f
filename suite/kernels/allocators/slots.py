"""State slots: an id space of their own, one slot per live request, and snapshots for the prefix cache.

A slot is all or nothing, so there are no pages and no offsets. Alloc does not clear: the first prefill of a
request starts from zeros by itself. A *snapshot* is a slot that keeps the state after `position` tokens of some
prefix, so that another request can go on from there. Freed slots translate to -1, which kernels skip.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from suite.errors import InputError, InvariantError, OutOfPagesError
from suite.kernels.allocators.books import UNMAPPED, FreePages, PageMap
from suite.kernels.pools.state import KernelSlots, StatePool, VirtualSlots
from suite.kernels.upload import upload


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state after the first `position` tokens of a request, kept in virtual slot `slot`."""

    slot: int
    position: int


class SlotHome(Protocol):
    """Where virtual slots are kept. `map`: virtual slot -> kernel slot, -1 unbound."""

    map: PageMap

    @property
    def moves_are_held(self) -> bool: ...

    def room(self) -> int:
        """Slots that could be bound now."""

    def bind(self, slots: Sequence[int]) -> None: ...

    def unbind(self, slots: Sequence[int]) -> None: ...

    def relocated(self, slots: Sequence[int]) -> int:
        """How many of these live slots a move has touched."""


class FixedSlots:
    """The slots of a pool of their own: every slot is where its number says."""

    moves_are_held = True

    def __init__(self, pool: StatePool) -> None:
        self.pool, self.map = pool, PageMap(pool.slots + 1, pool.device)

    def room(self) -> int:
        return self.pool.slots

    def bind(self, slots: Sequence[int]) -> None:
        self.map.set(slots, slots)

    def unbind(self, slots: Sequence[int]) -> None:
        self.map.set(slots, [UNMAPPED] * len(slots))
        self.pool.poison_slots(upload(slots, self.pool.device))

    def relocated(self, slots: Sequence[int]) -> int:
        return 0


class SlotAllocator:
    """Virtual slots 1 to `pool.slots`; slot 0 is padding and never handed out.

    The host's books are the authority; `slot_map` follows on the device, in stream order. In a unified pool slots
    share their bytes with pages and are moved like them: who holds a virtual slot never notices.
    """

    def __init__(self, pool: StatePool, home: SlotHome | None = None) -> None:
        self.pool = pool
        self.home: SlotHome = home or FixedSlots(pool)
        self.free_virtual = FreePages(range(1, pool.slots + 1))
        self.snapshots: dict[int, Snapshot] = {}
        self._live: set[int] = set()
        self.mutations = 0  # grows with every change of the slot map

    @property
    def slot_map(self) -> torch.Tensor:
        """Virtual slot -> kernel slot, int64 [slots + 2]; -1 for a free slot and in the last row, 0 -> 0."""
        return self.home.map.device

    def available_slots(self) -> int:
        """Slots that `alloc` or a snapshot can take now, moves included."""
        return min(len(self.free_virtual), self.home.room())

    def live_slots(self) -> int:
        """Slots that requests hold, snapshots apart."""
        return len(self._live)

    def relocated(self, slots: Sequence[int]) -> int:
        """How many of these live slots a move has touched since they were bound."""
        return self.home.relocated(slots)

    def bytes_in_use(self) -> int:
        return (self.live_slots() + len(self.snapshots)) * self.pool.geometry.slot_bytes

    def alloc(self, count: int) -> list[int]:
        """`count` virtual slots, their state whatever it was. OutOfPagesError takes nothing."""
        if count < 0:
            raise InputError("count", count, "a slot count of 0 or more")
        if count > (available := self.available_slots()):
            raise OutOfPagesError(f"asked for {count} state slots, {available} available")
        slots = self._bind(count)
        self._live.update(slots)
        return slots

    def free(self, slots: Sequence[int]) -> None:
        """Give slots back. InvariantError for a slot that no request holds."""
        given = list(slots)
        self._require_live(given)
        self._live.difference_update(given)
        self._unbind(given)

    def snapshot(self, slot: int, position: int) -> Snapshot:
        """Keep the state of live `slot`, which is the one after `position` tokens. OutOfPagesError takes nothing."""
        self._require_live([slot])
        kept = self.reserve_snapshot(position)
        self._copy(slot, kept.slot)
        return kept

    def reserve_snapshot(self, position: int) -> Snapshot:
        """A snapshot whose state a prefill is about to write into its slot. OutOfPagesError takes nothing."""
        if position < 1:
            raise InputError("position", position, "at least one token: the state before it is all zeros")
        if not self.available_slots():
            raise OutOfPagesError("asked for 1 state slot for a snapshot, 0 available")
        (kept,) = self._bind(1)
        self.snapshots[kept] = Snapshot(slot=kept, position=position)
        return self.snapshots[kept]

    def restore(self, snapshot: Snapshot, slot: int) -> int:
        """Copy the kept state into live `slot`; returns the position from which its request goes on."""
        self._require_snapshot(snapshot)
        self._require_live([slot])
        self._copy(snapshot.slot, slot)
        return snapshot.position

    def drop(self, snapshot: Snapshot) -> None:
        """Give a snapshot's slot back. InvariantError when it is gone already."""
        self._require_snapshot(snapshot)
        del self.snapshots[snapshot.slot]
        self._unbind([snapshot.slot])

    def kernel_slots(self, slots: VirtualSlots) -> KernelSlots:
        """Where kernels find these slots now: -1 for negative and freed ones, 0 for padding."""
        if not isinstance(slots, VirtualSlots):
            raise TypeError(f"kernel_slots: needs VirtualSlots, got {type(slots).__name__}")
        virtual = slots.tensor
        return KernelSlots(torch.where(virtual < 0, UNMAPPED, self.slot_map[virtual.clamp(min=0)]))

    def export_slots(self, slots: Sequence[int]) -> KernelSlots:
        """Where slots in use lie, for a hand-off that copies their bytes inside the allocator's `hold_moves`.

        InvariantError for a free slot, and where one could move under the copy.
        """
        if not self.home.moves_are_held:
            raise InvariantError("export_slots: moves held False != True: a slot may move while its bytes are copied")
        for slot in slots:
            if slot not in self._live and slot not in self.snapshots:
                raise InvariantError(f"slot {slot} is neither live nor kept")
        return KernelSlots(upload(self.home.map.host[list(slots)], self.pool.device))

    def check(self) -> None:
        """Raise InvariantError, with the broken equation, when the books do not balance."""
        free, live, kept, slots = len(self.free_virtual), len(self._live), len(self.snapshots), self.pool.slots
        if free + live + kept != slots:
            raise InvariantError(f"state: free {free} + live {live} + snapshots {kept} != slots {slots}")
        bound = int((self.home.map.host[1:-1] >= 0).sum())
        if bound != live + kept:
            raise InvariantError(f"state: bound {bound} != live {live} + snapshots {kept}")
        both = self._live & set(self.snapshots)
        if both or any(slot in self.free_virtual for slot in (*self._live, *self.snapshots)):
            raise InvariantError(f"state: slots {sorted(both)} are live and kept, or a slot in use is free")

    # -- inside ----------------------------------------------------------------------------------

    def _bind(self, count: int) -> list[int]:
        if count == 0:
            return []
        slots = self.free_virtual.take(count)
        self.home.bind(slots)
        self.mutations += 1
        return slots

    def _unbind(self, slots: list[int]) -> None:
        if not slots:
            return
        self.home.unbind(slots)
        self.free_virtual.put(slots)
        self.mutations += 1

    def _copy(self, source: int, target: int) -> None:
        pair = upload([self.home.map.host[source], self.home.map.host[target]], self.pool.device)
        self.pool.copy_slots(KernelSlots(pair[:1]), KernelSlots(pair[1:]))

    def _require_live(self, slots: list[int]) -> None:
        for slot in slots:
            if slot not in self._live:
                raise InvariantError(f"slot {slot} is not live: it is padding, out of range, a snapshot or free")
        if len(set(slots)) != len(slots):
            raise InvariantError(f"slots named twice in one call: {sorted(slots)}")

    def _require_snapshot(self, snapshot: Snapshot) -> None:
        if self.snapshots.get(snapshot.slot) != snapshot:
            raise InvariantError(f"{snapshot} is not kept: it was dropped")
