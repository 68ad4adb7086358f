"""Where the tokens of running requests live: virtual pages, rows of `req_to_token`, state slots, shared prefixes.

Nobody reserves for its whole length: a request gets the pages of its next tokens, and whoever comes last gives
everything back when there is no more room. Nothing here ever sees a kernel id.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import torch

from suite.e2e.engine.prefix_cache import Prefix, PrefixCache
from suite.e2e.engine.requests import Request
from suite.errors import InvariantError
from suite.kernels.allocators.paged import PageAllocator
from suite.kernels.allocators.slots import SlotAllocator
from suite.kernels.geometry import pages_for
from suite.kernels.ids import KVKind, VirtualIds
from suite.kernels.upload import upload


class RequestMemory:
    """The pages of all requests and of the prefix cache.

    `limit`: how many pages these may hold together, whatever the pool could give; with the same limit every arm
    decides alike. `foreign` counts the live pages of somebody else. `look_ahead`: tokens past the newest that a
    step may write (drafts). `prefix_cache` keeps what requests computed; `snapshot_tokens`, a multiple of the page
    size, is how far apart recurrent states are kept, `max_snapshots` how many of them.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        req_to_token: torch.Tensor,
        *,
        slots: SlotAllocator | None = None,
        req_to_slot: torch.Tensor | None = None,
        limit: int | None = None,
        foreign: Callable[[], int] = lambda: 0,
        look_ahead: int = 0,
        chunk_tokens: int = 1,
        prefix_cache: bool = False,
        snapshot_tokens: int = 0,
        max_snapshots: int = 1,
    ) -> None:
        self.allocator, self.req_to_token = allocator, req_to_token
        self.slots, self.req_to_slot = slots, req_to_slot
        self.page_size, self.limit, self.look_ahead = allocator.page_size, limit, look_ahead
        self.window = allocator.pool.geometry.window
        self.cache = PrefixCache(allocator, slots) if prefix_cache else None
        self.snapshot_tokens = snapshot_tokens if prefix_cache and slots is not None else 0
        self.max_snapshots = max_snapshots
        self.shares_bytes = allocator.pool.mode != "static"
        reach = 0 if self.window is None or self.window.window is None else self.window.window
        self.reach_pages = pages_for(reach, self.page_size) + pages_for(chunk_tokens, self.page_size) + 1
        self._foreign = foreign
        self._offsets = torch.arange(self.page_size, device=req_to_token.device)

    # -- capacity --------------------------------------------------------------------------------

    def most_pages(self) -> int:
        """Pages that one request could have if it were alone."""
        most = self.allocator.most_pages()
        if self.limit is not None:
            return min(most, self.limit)
        if self.window is None or most < self.reach_pages:
            return most
        return self.allocator.pool.num_pages(KVKind.FULL) - 1  # window rows go again as it grows

    def longest_pages(self, request: Request) -> int:
        return pages_for(request.longest + self.look_ahead, self.page_size)

    @property
    def held(self) -> int:
        """Pages of requests and cache, shared ones once."""
        return self.allocator.live_pages(KVKind.FULL) - self._foreign()

    def headroom(self) -> int:
        """Pages that can be had without evicting anything."""
        available = self.allocator.available_pages()
        return available if self.limit is None else min(available, self.limit - self.held)

    def missing_pages(self, request: Request, tokens: int) -> int:
        """Pages that the request lacks to store its first `tokens` tokens."""
        return max(0, pages_for(tokens, self.page_size) - len(request.pages))

    def unstored_pages(self, request: Request) -> int:
        """Pages that the request will take for what is known of it, counted in pages that are bound in every sub-pool.

        Where nothing but bytes limits anybody, what leaves the window again as a prefill goes on counts by its bytes.
        """
        pages = self.missing_pages(request, len(request.tokens) + self.look_ahead)
        if self.limit is not None or self.window is None or pages <= self.reach_pages:
            return pages
        pool = self.allocator.pool
        full, window = (pool.page_bytes(kind) for kind in (KVKind.FULL, KVKind.WINDOW))
        later = pages - self.reach_pages
        # pools apart: the window pool has no part in them, and the full one is asked when they are written
        return self.reach_pages + (-(-later * full // (full + window)) if self.shares_bytes else 0)

    def make_room(self, pages: int) -> bool:
        """Evict from the prefix cache until `pages` can be had; False when that is not enough."""
        if not self._is_short(pages):
            return True
        if self.cache is None:
            return False
        if self.limit is None:  # under a limit of pages, window rows are not what is short
            self.cache.tombstone(lambda: self._is_short(pages))
        return self.cache.evict(lambda: self._is_short(pages))

    # -- a request's stay ------------------------------------------------------------------------

    def attach(self, request: Request, row: int, running: Sequence[Request]) -> bool:
        """Let the request in on `row`, with the cached part of its tokens, if its other tokens and a margin fit.

        The margin: what the `running` ones have still to store of what they know, and a page for everybody's next
        tokens. Pages are taken when they are written; this only makes sure that they can be had. A request that is
        alone may have all the room there is.
        """
        if self.slots is not None and not self._slot_available(self.slots):
            return False
        prefix = self._share_prefix(request)
        if running and not self._could_have([*running, request]):
            self._give_back(request)
            return False
        request.row = row
        if self.slots is not None and self.req_to_slot is not None:
            (request.slot,) = self.slots.alloc(1)
            self.req_to_slot[row].fill_(request.slot)
            # at once: making room may evict the snapshot
            if prefix.snapshot is not None and self.slots.restore(prefix.snapshot, request.slot) != request.computed:
                raise InvariantError(f"snapshot position {prefix.snapshot.position} != computed {request.computed}")
        self._fill_row(request)
        if not request.retractions:
            request.cached_tokens = request.computed
        return True

    def grow(self, requests: Sequence[Request], query_lens: Sequence[int]) -> None:
        """Pages for the new tokens of a step. The room was made before."""
        missing = [self.missing_pages(r, r.computed + n) for r, n in zip(requests, query_lens, strict=True)]
        pages = self.allocator.alloc(sum(missing))
        for request, count in zip(requests, missing, strict=True):
            if count:
                request.pages += pages[:count]
                del pages[:count]

    def place(self, requests: Sequence[Request], query_lens: Sequence[int]) -> tuple[VirtualIds, list[int]]:
        """Write the new tokens' slots into `req_to_token`; returns them [tokens], and the pages that they lie in."""
        rows: list[int] = []
        columns: list[int] = []
        slots: list[int] = []
        written: list[int] = []
        size = self.page_size
        for request, length in zip(requests, query_lens, strict=True):
            first, end = request.computed, request.computed + length
            pages = request.pages[first // size : pages_for(end, size)]
            written += pages
            rows += [request.row] * length
            columns += range(first, end)
            if len(pages) == 1:
                begin = pages[0] * size + first % size
                slots += range(begin, begin + length)
            else:
                flat = [slot for page in pages for slot in range(page * size, page * size + size)]
                slots += flat[first % size : first % size + length]
        placed = upload((rows, columns, slots), self.req_to_token.device)
        self.req_to_token[placed[0], placed[1]] = placed[2].to(torch.int32)
        return VirtualIds(placed[2]), written

    def leave_window(self, requests: Sequence[Request]) -> None:
        """Tombstone what no later query of these requests sees: one call for all of them.

        Counted from the last page end, so that a prefix that ends there still has its whole window.
        """
        if self.window is None:
            return
        evict: list[int] = []
        for request in requests:
            out = self._out_of_window(request)
            if out > request.evicted_pages:
                evict += request.pages[request.evicted_pages : out]
                request.evicted_pages = out
        self._evict_window(evict)

    def keep(self, requests: Sequence[Request]) -> None:
        """Put what these requests have computed into the prefix cache."""
        if self.cache is None:
            return
        for request in requests:
            self.cache.insert(request.tokens[: request.computed], request.pages)

    def snapshot(self, requests: Sequence[Request]) -> None:
        """Put the state of every request that stands at a block end into the prefix cache, with the pages before it."""
        if not self.snapshot_tokens or self.slots is None or self.cache is None:
            return
        for request in requests:
            if request.done or request.computed % self.snapshot_tokens:
                continue
            while self.cache.snapshots >= self.max_snapshots:
                self.cache.evict_snapshot()
            if self._slot_available(self.slots):
                self.cache.insert(
                    request.tokens[: request.computed],
                    request.pages,
                    self.slots.snapshot(request.slot, request.computed),
                )

    def release(self, requests: Sequence[Request]) -> None:
        """Take requests out of the batch: keep what is reusable, give everything else back."""
        self.keep([request for request in requests if request.score_from is None])
        for request in requests:
            self._give_back(request)
            if self.slots is not None:
                self.slots.free([request.slot])
            request.row = request.slot = 0

    def clear(self) -> None:
        """Empty the prefix cache."""
        if self.cache is not None:
            self.cache.clear()

    def check(self, running: Sequence[Request]) -> None:
        """Raise InvariantError unless every held page is accounted for: by requests, by the cache, or by both."""
        want = Counter(page for request in running for page in request.pages)
        if self.cache is not None:
            self.cache.check()
            want.update(self.cache.pages())
        if len(want) != self.held:
            raise InvariantError(f"pages of requests and cache {len(want)} != held {self.held}")
        for page, count in want.items():
            if (holders := self.allocator.holders(page)) != count:
                raise InvariantError(f"page {page}: holders {holders} != requests and cache {count}")

    # -- inside ----------------------------------------------------------------------------------

    def _share_prefix(self, request: Request) -> Prefix:
        if self.cache is None or request.reusable < self.page_size:
            return Prefix(pages=[])
        prefix = self.cache.match(request.tokens, request.reusable)
        if prefix.pages:
            self.allocator.share(prefix.pages)
            request.pages = list(prefix.pages)
            request.computed = len(prefix.pages) * self.page_size
            request.evicted_pages = self._out_of_window(request)
            self._evict_window(request.pages[: request.evicted_pages])
        return prefix

    def _fill_row(self, request: Request) -> None:
        """The shared slots of the request in its row of `req_to_token`."""
        if request.computed:
            pages = upload(request.pages, self.req_to_token.device)
            slots = (pages[:, None] * self.page_size + self._offsets).flatten()
            self.req_to_token[request.row, : len(slots)] = slots.to(torch.int32)

    def _give_back(self, request: Request) -> None:
        pages, evicted = request.pages, request.evicted_pages
        request.pages, request.evicted_pages, request.computed = [], 0, 0
        if not pages:
            return
        self._evict_window(pages[evicted:])
        self.allocator.free(pages)

    def _out_of_window(self, request: Request) -> int:
        """Pages that no query of the request sees from the last page end on."""
        if self.window is None or self.window.window is None:
            return 0
        whole = request.computed // self.page_size * self.page_size
        return max(0, whole - self.window.window + 1) // self.page_size

    def _evict_window(self, pages: list[int]) -> None:
        """Drop one reader of each page; a page that is named twice has lost two."""
        while pages and self.window is not None:
            once = list(dict.fromkeys(pages))
            self.allocator.evict_window(once)
            pages = [] if len(once) == len(pages) else list((Counter(pages) - Counter(once)).elements())

    def _could_have(self, requests: Sequence[Request]) -> bool:
        """Whether all that these requests know can be stored, and a page for each."""
        room = self.headroom()
        pages = len(requests) + sum(self.unstored_pages(request) for request in requests)
        if room < pages and room + self._reclaimable() < pages:
            return False
        if self.limit is not None or self.shares_bytes:
            return True
        # pools apart: full pages are an own account
        free = self.allocator.pool.num_pages(KVKind.FULL) - 1 - self.allocator.live_pages(KVKind.FULL)
        full = len(requests) + sum(self.missing_pages(r, len(r.tokens) + self.look_ahead) for r in requests)
        return free + self._reclaimable() >= full

    def _is_short(self, pages: int) -> bool:
        over = self.limit is not None and self.limit - self.held < pages
        return over or not self.allocator.fits(pages=pages)

    def _reclaimable(self) -> int:
        return 0 if self.cache is None else self.cache.reclaimable()

    def _slot_available(self, slots: SlotAllocator) -> bool:
        """Make room for one state slot: snapshots go first, then pages that share their bytes."""
        while not slots.available_slots():
            if self.cache is None:
                return False
            if not self.cache.evict_snapshot():
                return self.cache.evict(lambda: not slots.available_slots())
        return True
