"""Allocators against a plain Python model: random interleavings, every pool mode and composition, every byte stamped.

Each live page is stamped with its virtual number in every layer's rows, each slot with a number of its own, so
a lost, doubled or misplaced move shows as a wrong stamp and not as a plausible map.
"""

import contextlib
import random

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from suite.errors import OutOfPagesError
from suite.kernels.allocators.slots import Snapshot
from suite.kernels.ids import KVKind
from suite.kernels.pools.state import VirtualSlots
from tests.pool_rig import COMPOSITIONS, MODES, build, is_clear, rows, stamp, wrongly_stamped

COUNTS = st.sampled_from([0, 1, 2, 3, 5, 8, "half", "all", "all but one", "one too many"])


def count_of(asked: int | str, available: int) -> int:
    words = {"half": available // 2, "all": available, "all but one": max(0, available - 1)}
    return words.get(asked, available + 1) if isinstance(asked, str) else asked


class AllocatorMachine(RuleBasedStateMachine):
    """The books of a careful clerk.

    live: virtual page -> one entry per holder: does that holder still read the window rows. slots and kept: state
    slot and snapshot -> its stamp, None while nobody wrote it.
    """

    shapes = COMPOSITIONS

    @initialize(mode=st.sampled_from(MODES), eager=st.booleans(), data=st.data())
    def setup(self, mode, eager, data):
        shape = self.shapes[data.draw(st.sampled_from(sorted(self.shapes)))]
        self.allocator = build(mode, shape, pages=12, slots=4, eager=eager, wait_for_forward=self.forward_has_ended)
        self.unified = mode != "static"
        self.kinds = [pool.kind for pool in shape.pools]
        self.has_window = shape.window is not None
        self.live: dict[int, list[bool]] = {}
        self.slots: dict[int, int | None] = {}
        self.kept: dict[Snapshot, int | None] = {}
        self.clock = 0
        self.held: contextlib.ExitStack | None = None
        self.places: dict[object, object] = {}  # where things were when moves were held
        self.read: dict[tuple[KVKind, int], slice] | None = None  # what the forward in flight reads, and where
        self.written: set[int] = set()

        if data.draw(st.booleans()):
            self.fill(random.Random(data.draw(st.integers(0, 10_000))))

    def fill(self, dice):
        """A full buffer with holes everywhere: what follows has to move something."""
        if self.allocator.slots is not None:
            self.take_slots(dice.randint(1, self.allocator.slots.available_slots()))
        self.take_pages(self.allocator.available_pages())
        self.give_back({page: 0 for page in self.live if dice.random() < 0.5})
        self.leave_window([page for page in self.live if dice.random() < 0.3])
        if self.slots:
            self.give_back_slots([slot for slot in self.slots if dice.random() < 0.5])

    # -- pages -----------------------------------------------------------------------------------

    @rule(asked=COUNTS)
    def alloc(self, asked):
        self.take_pages(count_of(asked, self.allocator.available_pages()))

    def take_pages(self, count):
        available = self.allocator.available_pages()
        assert self.allocator.fits(pages=count) == (count <= available)
        roomy = self.unified and count <= self.allocator.capacity_pages()
        before, moved = self.allocator.mutations, self.allocator.pages_moved
        try:
            pages = self.allocator.alloc(count)
        except OutOfPagesError:
            assert count > available
            assert self.allocator.mutations == before
            return
        assert count <= available
        assert count == len(set(pages))
        assert not set(pages) & set(self.live)
        assert 0 not in pages
        assert moved == self.allocator.pages_moved or not roomy, "moved a page although there was room"
        for page in pages:
            for kind in self.kinds:
                where = rows(self.allocator, kind, page)
                assert is_clear(self.allocator, kind, where), "a freshly bound page is not clear"
                stamp(self.allocator, kind, page, where)
        self.live |= {page: [True] for page in pages}

    def some_pages(self, data, most=10):
        return data.draw(st.lists(st.sampled_from(sorted(self.live)), unique=True, max_size=most))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def share(self, data):
        pages = self.some_pages(data)
        self.allocator.share(pages)
        for page in pages:
            self.live[page].append(any(self.live[page]))  # a holder that comes after the tombstone reads no window

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data):
        """A holder of each page leaves; one that still reads the window says so first, if there are others."""
        pages = self.some_pages(data)
        self.give_back({page: data.draw(st.integers(0, len(self.live[page]) - 1)) for page in pages})

    def give_back(self, leaving):
        """leaving: page -> which of its holders."""
        reading = [page for page, at in leaving.items() if self.live[page][at] and len(self.live[page]) > 1]
        self.allocator.evict_window(reading)
        for page in reading:
            self.live[page][leaving[page]] = False
        self.allocator.free(list(leaving))
        for page, at in leaving.items():
            del self.live[page][at]
            if not self.live[page]:
                del self.live[page]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def evict(self, data):
        """One reader of each page's window rows leaves them; a page that is a tombstone already is passed over."""
        self.leave_window(self.some_pages(data))

    def leave_window(self, pages):
        self.allocator.evict_window(pages)
        for page in pages:
            if True in self.live[page]:
                self.live[page][self.live[page].index(True)] = False

    # -- state slots -----------------------------------------------------------------------------

    has_slots = precondition(lambda self: self.allocator.slots is not None)

    @has_slots
    @rule(asked=COUNTS)
    def alloc_slots(self, asked):
        self.take_slots(count_of(asked, self.allocator.slots.available_slots()))

    def take_slots(self, count):
        available = self.allocator.slots.available_slots()
        assert self.allocator.fits(pages=0, slots=count) == (count <= available)
        try:
            got = self.allocator.slots.alloc(count)
        except OutOfPagesError:
            assert count > available
            return
        assert count == len(set(got)) <= available
        assert 0 not in got
        assert not set(got) & {*self.slots, *(snapshot.slot for snapshot in self.kept)}
        self.slots |= dict.fromkeys(got)
        for slot in got[::2]:
            self.write(slot)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def write_slot(self, data):
        self.write(data.draw(st.sampled_from(sorted(self.slots))))

    def write(self, slot):
        self.clock = self.clock % 200 + 1  # a bf16 window holds it exactly
        for stream in self.allocator.pool.state.streams():
            stream[:, self.kernel_slot(slot)] = self.clock
        self.slots[slot] = self.clock

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def free_slots(self, data):
        gone = data.draw(st.lists(st.sampled_from(sorted(self.slots)), unique=True, max_size=5))
        self.give_back_slots(gone)

    def give_back_slots(self, gone):
        for slot in gone:
            del self.slots[slot]  # first: an eager free may pack, and so wait for the forward, before it returns
        self.allocator.slots.free(gone)
        assert all(self.kernel_slot(slot) == -1 for slot in gone)

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), reserve=st.booleans())
    def keep(self, data, reserve):
        slot, available = data.draw(st.sampled_from(sorted(self.slots))), self.allocator.slots.available_slots()
        try:
            kept = self.allocator.slots.reserve_snapshot(7) if reserve else self.allocator.slots.snapshot(slot, 7)
        except OutOfPagesError:
            assert not available
            return
        assert available
        self.kept[kept] = None if reserve else self.slots[slot]

    @precondition(lambda self: self.slots and self.kept)
    @rule(data=st.data())
    def restore(self, data):
        snapshot = data.draw(st.sampled_from(sorted(self.kept, key=lambda kept: kept.slot)))
        slot = data.draw(st.sampled_from(sorted(self.slots)))
        assert self.allocator.slots.restore(snapshot, slot) == 7
        self.slots[slot] = self.kept[snapshot]

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def drop(self, data):
        snapshot = data.draw(st.sampled_from(sorted(self.kept, key=lambda kept: kept.slot)))
        del self.kept[snapshot]
        self.allocator.slots.drop(snapshot)

    def kernel_slot(self, slot: int) -> int:
        return int(self.allocator.slots.kernel_slots(VirtualSlots(torch.tensor([slot]))).tensor)

    def stamp_of(self, slot: int) -> int | None:
        """The one value that every element of the slot holds; None while it holds none."""
        at = self.kernel_slot(slot)
        values = torch.cat([stream[:, at].flatten().float() for stream in self.allocator.pool.state.streams()])
        if values.isnan().all():
            return None
        assert (values == values[0]).all(), "a slot that is half somebody else's"
        return int(values[0])

    # -- forwards and moves ----------------------------------------------------------------------

    @precondition(lambda self: self.unified and self.read is None)
    @rule(data=st.data(), names_slots=st.booleans())
    def begin_forward(self, data, names_slots):
        self.written = set(self.some_pages(data)) if self.live else set()
        self.written_slots = sorted(self.slots) if names_slots else [*self.slots, *(kept.slot for kept in self.kept)]
        self.allocator.begin_forward(sorted(self.written), self.written_slots if names_slots else None)
        self.read = {(kind, page): rows(self.allocator, kind, page) for page in self.live for kind in self.kinds}
        self.places_written = {slot: self.kernel_slot(slot) for slot in self.written_slots}

    @precondition(lambda self: self.unified and self.read is not None)
    @rule()
    def end_forward(self):
        self.forward_has_ended()
        self.allocator.end_forward()

    def forward_has_ended(self):
        """Also what an urgent move waits for: up to then everything is where the forward looks for it."""
        self.what_the_forward_reads_stays()
        self.read = None

    @precondition(lambda self: self.unified)
    @rule(urgent=st.booleans())
    def compact(self, urgent):
        moved = self.allocator.compact(urgent=urgent)
        if self.held:
            assert moved == 0, "moved a page while moves were held"
        elif self.read is None:
            assert not any(span.holes or span.pending for span in self.allocator.chain.spans), "packing left a hole"
        else:
            assert not urgent

    @precondition(lambda self: not self.held)
    @rule()
    def hold_moves(self):
        self.held = contextlib.ExitStack()
        self.held.enter_context(self.allocator.hold_moves())
        self.places = self.all_places()

    @precondition(lambda self: self.held)
    @rule()
    def let_moves_go(self):
        self.held.close()
        self.held = None

    def all_places(self):
        pages = {(kind, page): rows(self.allocator, kind, page) for page in self.live for kind in self.kinds}
        slots = {slot: self.kernel_slot(slot) for slot in (*self.slots, *(kept.slot for kept in self.kept))}
        return pages | slots

    # -- what always holds -----------------------------------------------------------------------

    @invariant()
    def nothing_moves_while_moves_are_held(self):
        if not self.held:
            return
        now = self.all_places()
        self.places = {key: place for key, place in self.places.items() if now.get(key) is not None}
        assert all(now[key] == place for key, place in self.places.items())
        self.places = now

    @invariant()
    def what_the_forward_reads_stays(self):
        if self.read is None:
            return
        for (kind, page), where in list(self.read.items()):
            now = rows(self.allocator, kind, page) if page in self.live else None
            if where is None or now is None:
                del self.read[kind, page]  # given back under the forward: its rows are for others
            else:
                assert now == where or page not in self.written, "moved a page that the forward writes"
        for kind in self.kinds:
            seen = {page: where for (its, page), where in self.read.items() if its is kind}
            wrong = wrongly_stamped(self.allocator, kind, seen)
            assert not wrong, f"{kind} pages {wrong} were overwritten where the forward in flight reads them"
        in_use = {*self.slots, *(kept.slot for kept in self.kept)}
        for slot in list(self.places_written):
            if slot not in in_use or self.kernel_slot(slot) != self.places_written[slot]:
                assert slot not in in_use, "moved a slot that the forward writes"
                del self.places_written[slot]

    @invariant()
    def books_balance(self):
        self.allocator.check()
        assert self.allocator.live_pages(KVKind.FULL) == len(self.live)
        if self.has_window:
            assert self.allocator.live_pages(KVKind.WINDOW) == sum(any(readers) for readers in self.live.values())
        for page, readers in self.live.items():
            assert self.allocator.holders(page) == len(readers)
            assert self.allocator.has_window(page) == (self.has_window and any(readers))
        if self.allocator.slots is not None:
            assert self.allocator.slots.live_slots() == len(self.slots)

    @invariant()
    def every_live_page_and_slot_holds_its_stamp(self):
        for kind in self.kinds:
            places = {page: rows(self.allocator, kind, page) for page in self.live}
            gone = {page for page, readers in self.live.items() if kind is KVKind.WINDOW and not any(readers)}
            assert gone == {page for page, where in places.items() if where is None}
            wrong = wrongly_stamped(
                self.allocator, kind, {page: places[page] for page in self.live if page not in gone}
            )
            assert not wrong, f"{kind} pages {wrong} hold other rows"
        for slot, number in self.slots.items():
            assert number is None or self.stamp_of(slot) == number
        for snapshot, number in self.kept.items():
            assert number is None or self.stamp_of(snapshot.slot) == number

    @invariant()
    def sinks_are_finite(self):
        pool = self.allocator.pool
        for part in pool.geometry.pools:
            assert all(pool.k_view(layer)[: pool.geometry.page_size].isfinite().all() for layer in part.layers)
        if pool.state is not None:
            assert not any(stream[:, 0].any() for stream in pool.state.streams()), "the padding slot was handed out"


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(
    max_examples=50, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
