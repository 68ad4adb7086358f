"""Page maps, the virtual page list, and the allocator of the static pool."""

import abc
import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from suite.errors import InputError, InvariantError, OutOfPagesError
from suite.kernels.ids import KVKind
from suite.kernels.pools import KVPool
from suite.kernels.pools.static import StaticPool
from suite.kernels.upload import upload

if TYPE_CHECKING:
    from suite.kernels.allocators.multi_ended import Span

UNMAPPED = -1


class PageMap:
    """Virtual page -> physical page: int64 [virtual pages + 1], page 0 -> 0, the last row -1 forever.

    The host copy is the authority; the device copy follows in stream order.
    """

    def __init__(self, virtual_pages: int, device: torch.device) -> None:
        self.host = np.full(virtual_pages + 1, UNMAPPED, dtype=np.int64)
        self.host[0] = 0
        self.device = torch.from_numpy(self.host.copy()).to(device)

    def set(self, virtual: npt.ArrayLike, physical: npt.ArrayLike) -> None:
        pairs = np.stack((np.asarray(virtual), np.asarray(physical)))
        self.host[pairs[0]] = pairs[1]
        where, what = upload(pairs, self.device.device)
        self.device.index_copy_(0, where, what)


class FreePages:
    """Free page numbers, oldest first, so that a page's number is reused as late as possible."""

    def __init__(self, pages: Iterable[int]) -> None:
        self._queue = deque(pages)
        self._set = set(self._queue)

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, page: int) -> bool:
        return page in self._set

    def take(self, count: int) -> list[int]:
        pages = [self._queue.popleft() for _ in range(count)]
        self._set.difference_update(pages)
        return pages

    def put(self, pages: Sequence[int]) -> None:
        self._queue.extend(pages)
        self._set.update(pages)

    def check(self, name: str) -> None:
        """Raise InvariantError when a page is in the list twice, or the sink is."""
        if len(self._queue) != len(self._set):
            raise InvariantError(f"{name}: free pages {len(self._queue)} != distinct free pages {len(self._set)}")
        if 0 in self._set:
            raise InvariantError(f"{name}: the sink, page 0, is in the free list")


class PageAllocator(abc.ABC):
    """Virtual pages of one runner. A virtual page is bound in every sub-pool of the runner at once.

    Whether pages ever move is the allocator's own: callers tell it of every forward and ask it to pack, and
    where nothing moves that does nothing.
    """

    spans: "tuple[Span, ...]" = ()  # the sub-pools whose pages move
    moves_are_held = True  # whether every page stays where it is, for now or forever

    def __init__(self, pool: KVPool, virtual_pages: int) -> None:
        self.pool, self.page_size = pool, pool.geometry.page_size
        self.virtual_pages = virtual_pages
        self.free_virtual = FreePages(range(1, virtual_pages))  # page 0 is the sink, in every space
        self.mutations = 0  # grows with every change of a page map; memos die by it

    @abc.abstractmethod
    def page_map(self, kind: KVKind) -> torch.Tensor | None:
        """Virtual page -> physical page on the device; None where they coincide."""

    @abc.abstractmethod
    def available_pages(self) -> int:
        """Pages that `alloc` can give now, moves included."""

    @abc.abstractmethod
    def most_pages(self) -> int:
        """Pages that `alloc` could give if nothing were live."""

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
        if count > (available := self.available_pages()):
            raise OutOfPagesError(f"asked for {count} pages, {available} available")
        if count == 0:
            return []
        virtual = self.free_virtual.take(count)
        self._bind(virtual)
        self.mutations += 1
        return virtual

    def free(self, virtual: Sequence[int]) -> None:
        """Give whole pages back, in every sub-pool. InvariantError for a page that is not live."""
        pages = self._require_live(virtual)
        if pages:
            self._unbind(pages)
            self.free_virtual.put(pages)
            self.mutations += 1

    def evict_window(self, virtual: Sequence[int]) -> None:
        """Tombstone pages that left the window: their window rows go back, id and full page stay."""
        pages = self._require_live(virtual)
        if pages:
            self._unbind_window(pages)
            self.mutations += 1

    @property
    @abc.abstractmethod
    def pages_moved(self) -> int:
        """Pages that compaction has moved so far."""

    @abc.abstractmethod
    def begin_forward(self, written: Sequence[int]) -> None:
        """A forward that writes into these virtual pages is in flight until `end_forward`."""

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
        """Pack what can move; returns the number of pages moved."""

    def bytes_in_use(self) -> dict[KVKind, int]:
        return {
            pool.kind: self.live_pages(pool.kind) * self.pool.page_bytes(pool.kind) for pool in self.pool.geometry.pools
        }

    def _require_live(self, virtual: Sequence[int]) -> list[int]:
        pages = list(virtual)
        for page in pages:
            if not 0 < page < self.virtual_pages or page in self.free_virtual:
                raise InvariantError(f"page {page} is not live: it is the sink, out of range or free already")
        if len(set(pages)) != len(pages):
            raise InvariantError(f"pages named twice in one call: {sorted(pages)}")
        return pages


class StaticAllocator(PageAllocator):
    """Full pages are their own virtual pages; window pages come from a list of their own. Nothing ever moves."""

    pool: StaticPool
    pages_moved = 0

    def __init__(self, pool: StaticPool) -> None:
        super().__init__(pool, pool.num_pages(KVKind.FULL))
        self._window_map: PageMap | None = None
        self._free_window = FreePages(())
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

    def live_pages(self, kind: KVKind) -> int:
        if kind is KVKind.FULL:
            return self.virtual_pages - 1 - len(self.free_virtual)
        return self.pool.num_pages(KVKind.WINDOW) - 1 - len(self._free_window)

    def begin_forward(self, written: Sequence[int]) -> None:
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
        if self._window_map is None:
            return
        bound = self._window_map.host[1:]
        physical = bound[bound >= 0]
        live, free, pages = len(physical), len(self._free_window), self.pool.num_pages(KVKind.WINDOW) - 1
        if free + live != pages:
            raise InvariantError(f"window: free {free} + live {live} != pages {pages}")
        if len(set(physical.tolist())) != live:
            raise InvariantError(f"window: {live} bound pages share {len(set(physical.tolist()))} physical pages")
        for page in np.flatnonzero(self._window_map.host[:-1] > 0).tolist():
            if page in self.free_virtual:
                raise InvariantError(f"window: free virtual page {page} is bound to {self._window_map.host[page]}")
