"""The two books that every allocator keeps: which number is bound where, and which numbers are free."""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from suite.errors import InvariantError
from suite.kernels.upload import upload

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
