"""Who holds which virtual page, and the allocator of the static pool."""

import abc
import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from suite.errors import InputError, InvariantError, OutOfPagesError
from suite.kernels.allocators.books import UNMAPPED, FreePages, PageMap
from suite.kernels.allocators.slots import SlotAllocator
from suite.kernels.geometry import STATE
from suite.kernels.ids import KVKind
from suite.kernels.pools import KVPool
from suite.kernels.pools.static import StaticPool
from suite.kernels.upload import upload

if TYPE_CHECKING:
    from suite.kernels.allocators.multi_ended import Span


class PageAllocator(abc.ABC):
    """Virtual pages of one runner. A virtual page is bound in every sub-pool of the runner at once.

    Whether pages ever move is the allocator's own: callers tell it of every forward and ask it to pack, and
    where nothing moves that does nothing.

    Pages are shared by count: `alloc` makes the first holder, `share` adds one, `free` drops one and unbinds the
    page when none is left. Window rows are counted apart: every holder still reads them until it says otherwise by
    `evict_window`, and the last reader to leave tombstones the page. Holders have no names, so `free` drops a
    reader only where readers would outnumber holders; who leaves a shared page it still reads evicts it first.
    """

    spans: "tuple[Span, ...]" = ()  # the sub-pools whose pages move
    moves_are_held = True  # whether every page stays where it is, for now or forever

    def __init__(self, pool: KVPool, virtual_pages: int) -> None:
        self.pool, self.page_size = pool, pool.geometry.page_size
        self.virtual_pages = virtual_pages
        self.free_virtual = FreePages(range(1, virtual_pages))  # page 0 is the sink, in every space
        self.mutations = 0  # grows with every change of a page map; memos die by it
        self.slots: SlotAllocator | None = None  # of a hybrid model's recurrent state
        self._holders = np.zeros(virtual_pages, dtype=np.int64)
        self._window_readers = np.zeros(virtual_pages, dtype=np.int64)

    @abc.abstractmethod
    def page_map(self, kind: KVKind) -> torch.Tensor | None:
        """Virtual page -> physical page on the device; None where they coincide."""

    @abc.abstractmethod
    def available_pages(self) -> int:
        """Pages that `alloc` can give now, moves included."""

    @abc.abstractmethod
    def most_pages(self) -> int:
        """Pages that one request could have if nothing else were live, its state slot apart."""

    @abc.abstractmethod
    def fits(self, *, pages: int, slots: int = 0) -> bool:
        """Whether that many pages and state slots can be had together now, moves included: they may share bytes."""

    @abc.abstractmethod
    def _bind(self, virtual: list[int]) -> None: ...

    @abc.abstractmethod
    def _unbind(self, virtual: list[int]) -> None: ...

    @abc.abstractmethod
    def _unbind_window(self, virtual: list[int]) -> None: ...

    @abc.abstractmethod
    def live_pages(self, kind: KVKind) -> int:
        """Pages of sub-pool `kind` that are bound now."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raise InvariantError, with the broken equation, when the books do not balance."""

    def alloc(self, count: int) -> list[int]:
        """`count` virtual pages, bound and cleared. OutOfPagesError takes nothing."""
        if count < 0:
            raise InputError("count", count, "a page count of 0 or more")
        if not self.fits(pages=count):
            raise OutOfPagesError(f"asked for {count} pages, {self.available_pages()} available")
        if count == 0:
            return []
        virtual = self.free_virtual.take(count)
        self._bind(virtual)
        self._holders[virtual] = 1
        self._window_readers[virtual] = self.pool.geometry.window is not None
        self.mutations += 1
        return virtual

    def share(self, virtual: Sequence[int]) -> None:
        """Add a holder to each page, a reader of its window rows where they still stand.

        InvariantError for a page that is not live.
        """
        pages = self._require_live(virtual)
        self._holders[pages] += 1
        self._window_readers[pages] += self._window_readers[pages] > 0

    def free(self, virtual: Sequence[int]) -> None:
        """Drop a holder of each page; without any left it goes back, in every sub-pool.

        InvariantError for a page that is not live.
        """
        pages = self._require_live(virtual)
        self._holders[pages] -= 1
        self._window_readers[pages] = np.minimum(self._window_readers[pages], self._holders[pages])
        if gone := [page for page in pages if not self._holders[page]]:
            self._unbind(gone)
            self.free_virtual.put(gone)
            self.mutations += 1

    def evict_window(self, virtual: Sequence[int]) -> None:
        """Drop a reader of each page's window rows; without any left those go back, id and full page stay.

        Once per holder and page. Pages that are tombstones already are passed over.
        """
        pages = self._require_live(virtual)
        read = [page for page in pages if self._window_readers[page]]
        self._window_readers[read] -= 1
        if gone := [page for page in read if not self._window_readers[page]]:
            self._unbind_window(gone)
            self.mutations += 1

    def holders(self, page: int) -> int:
        """How many hold virtual page `page`; 0 when it is free."""
        return int(self._holders[page])

    def has_window(self, page: int) -> bool:
        """Whether the window rows of `page` still stand: a prefix is worth sharing only as far as these reach back."""
        return bool(self._window_readers[page])

    @property
    @abc.abstractmethod
    def pages_moved(self) -> int:
        """Pages that compaction has moved so far."""

    @abc.abstractmethod
    def begin_forward(self, written: Sequence[int], written_slots: Sequence[int] | None = None) -> None:
        """A forward that writes into these virtual pages and state slots is in flight until `end_forward`.

        Without `written_slots`, it may write every slot in use.
        """

    @abc.abstractmethod
    def end_forward(self) -> None:
        """The forward in flight is done."""

    @contextlib.contextmanager
    def hold_moves(self) -> Iterator[None]:
        """A gate: no page moves inside the block, while rows are copied out or in by physical id.

        Pages are allocated and freed as before; what only a move could make room for is not available.
        """
        yield

    @abc.abstractmethod
    def compact(self, *, urgent: bool = False) -> int:
        """Pack what can move; returns the number of pages and slots moved."""

    def bytes_in_use(self) -> dict[str, int]:
        """Bytes of live pages by kind, and of state slots in use."""
        kinds = [pool.kind for pool in self.pool.geometry.pools]
        pages: dict[str, int] = {kind: self.live_pages(kind) * self.pool.page_bytes(kind) for kind in kinds}
        return pages if self.slots is None else pages | {STATE: self.slots.bytes_in_use()}

    def _require_live(self, virtual: Sequence[int]) -> list[int]:
        pages = list(virtual)
        for page in pages:
            if not 0 < page < self.virtual_pages or not self._holders[page]:
                raise InvariantError(f"page {page} is not live: it is the sink, out of range or free already")
        if len(set(pages)) != len(pages):
            raise InvariantError(f"pages named twice in one call: {sorted(pages)}")
        return pages

    def _check_holders(self) -> None:
        self.free_virtual.check("virtual")
        held, read = self._holders[1:], self._window_readers[1:]
        if (free := len(self.free_virtual)) + (live := int((held > 0).sum())) != self.virtual_pages - 1:
            raise InvariantError(f"virtual: free {free} + live {live} != pages {self.virtual_pages - 1}")
        if (read < 0).any() or (read > held).any():
            page = int(np.flatnonzero((read < 0) | (read > held))[0]) + 1
            raise InvariantError(f"window: page {page} has readers {read[page - 1]}, holders {held[page - 1]}")
        for pool in self.pool.geometry.pools:
            want = int(((held if pool.kind is KVKind.FULL else read) > 0).sum())
            if (live := self.live_pages(pool.kind)) != want:
                raise InvariantError(f"{pool.kind}: bound {live} != pages with a holder {want}")
        if self.slots is not None:
            self.slots.check()


class StaticAllocator(PageAllocator):
    """Full pages are their own virtual pages; window pages come from a list of their own. Nothing ever moves."""

    pool: StaticPool
    pages_moved = 0

    def __init__(self, pool: StaticPool) -> None:
        super().__init__(pool, pool.num_pages(KVKind.FULL))
        self._window_map: PageMap | None = None
        self._free_window = FreePages(())
        if pool.state is not None:
            self.slots = SlotAllocator(pool.state)
        if pool.geometry.window is not None:
            self._window_map = PageMap(self.virtual_pages, pool.device)
            self._free_window = FreePages(range(1, pool.num_pages(KVKind.WINDOW)))

    def page_map(self, kind: KVKind) -> torch.Tensor | None:
        return None if kind is KVKind.FULL or self._window_map is None else self._window_map.device

    def available_pages(self) -> int:
        return (
            len(self.free_virtual) if self._window_map is None else min(len(self.free_virtual), len(self._free_window))
        )

    def most_pages(self) -> int:
        return min(self.pool.num_pages(pool.kind) for pool in self.pool.geometry.pools) - 1

    def fits(self, *, pages: int, slots: int = 0) -> bool:
        return pages <= self.available_pages() and slots <= (self.slots.available_slots() if self.slots else 0)

    def live_pages(self, kind: KVKind) -> int:
        if kind is KVKind.FULL:
            return self.virtual_pages - 1 - len(self.free_virtual)
        return self.pool.num_pages(KVKind.WINDOW) - 1 - len(self._free_window)

    def begin_forward(self, written: Sequence[int], written_slots: Sequence[int] | None = None) -> None:
        """Nothing moves, so no forward is in the way of a move."""

    def end_forward(self) -> None:
        """As `begin_forward`."""

    def compact(self, *, urgent: bool = False) -> int:
        return 0

    def _bind(self, virtual: list[int]) -> None:
        device = self.pool.device
        self.pool.zero_pages(KVKind.FULL, upload(virtual, device))
        if self._window_map is not None:
            physical = self._free_window.take(len(virtual))
            self._window_map.set(virtual, physical)
            self.pool.zero_pages(KVKind.WINDOW, upload(physical, device))

    def _unbind(self, virtual: list[int]) -> None:
        self._unbind_window(virtual)
        self.pool.poison_pages(KVKind.FULL, upload(virtual, self.pool.device))

    def _unbind_window(self, virtual: list[int]) -> None:
        if self._window_map is None:
            return
        bound = [page for page in virtual if self._window_map.host[page] > 0]
        if bound:
            physical = self._window_map.host[bound].tolist()
            self._window_map.set(bound, [UNMAPPED] * len(bound))
            self.pool.poison_pages(KVKind.WINDOW, upload(physical, self.pool.device))
            self._free_window.put(physical)

    def check(self) -> None:
        self.free_virtual.check("virtual")
        self._free_window.check("window")
        if self._window_map is not None:
            self._check_window(self._window_map)
        self._check_holders()

    def _check_window(self, window_map: PageMap) -> None:
        bound = window_map.host[1:]
        physical = bound[bound >= 0]
        live, free, pages = len(physical), len(self._free_window), self.pool.num_pages(KVKind.WINDOW) - 1
        if free + live != pages:
            raise InvariantError(f"window: free {free} + live {live} != pages {pages}")
        if len(set(physical.tolist())) != live:
            raise InvariantError(f"window: {live} bound pages share {len(set(physical.tolist()))} physical pages")
        for page in np.flatnonzero(window_map.host[:-1] > 0).tolist():
            if page in self.free_virtual:
                raise InvariantError(f"window: free virtual page {page} is bound to {window_map.host[page]}")
