"""Continuous batching over virtual ids: who runs next, which slots its tokens get, what leaves the window.

Prefill goes first, in chunks of a token budget; otherwise every running request decodes one token.
The scheduler never sees a kernel id.
"""

from collections import deque
from dataclasses import dataclass

import torch

from suite.e2e.engine.requests import Request
from suite.errors import InputError, InvariantError
from suite.kernels.allocators.paged import PageAllocator
from suite.kernels.batch import ForwardMode
from suite.kernels.geometry import pages_for
from suite.kernels.ids import VirtualIds
from suite.kernels.upload import upload


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One forward to run: the requests, how many new tokens of each, and where those are stored."""

    mode: ForwardMode
    requests: list[Request]
    query_lens: list[int]
    virtual_write_ids: VirtualIds
    written_pages: list[int]

    @property
    def input_ids(self) -> list[int]:
        pairs = zip(self.requests, self.query_lens, strict=True)
        return [token for request, n in pairs for token in request.tokens[request.computed : request.computed + n]]

    @property
    def seq_lens(self) -> list[int]:
        return [request.computed + n for request, n in zip(self.requests, self.query_lens, strict=True)]


class Scheduler:
    """Admits up to `max_batch` requests whose pages, at their longest, all fit at once."""

    def __init__(
        self, allocator: PageAllocator, req_to_token: torch.Tensor, *, max_batch: int, chunk_tokens: int
    ) -> None:
        for name, value in (("max_batch", max_batch), ("chunk_tokens", chunk_tokens)):
            if value < 1:
                raise InputError(name, value, "a positive number")
        self.allocator, self.req_to_token = allocator, req_to_token
        self.page_size = allocator.page_size
        self.window = allocator.pool.geometry.window
        self.chunk_tokens = chunk_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._free_rows = deque(range(1, max_batch + 1))  # row 0 is the padding request
        self._reserved_pages = 0  # pages that running requests may still ask for

    def add(self, request: Request) -> None:
        limit = self.req_to_token.shape[1]
        if request.longest > limit:
            raise InputError("prompt_tokens + max_new_tokens", request.longest, f"at most {limit}, the longest context")
        if pages_for(request.longest, self.page_size) > (most := self.allocator.most_pages()):
            expected = f"at most {most * self.page_size}, what the pool holds of one request"
            raise InputError("prompt_tokens + max_new_tokens", request.longest, expected)
        self.waiting.append(request)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def next_step(self) -> Step:
        """Admit, choose, allocate. InvariantError when nothing can run although work is left."""
        self._admit()
        if not self.running:
            raise InvariantError(
                f"{len(self.waiting)} requests wait, none runs, {self.allocator.available_pages()} pages available"
            )
        prefilling = [request for request in self.running if request.is_prefilling]
        if prefilling:
            return self._step(ForwardMode.EXTEND, *self._chunks(prefilling))
        return self._step(ForwardMode.DECODE, self.running, [1] * len(self.running))

    def finish(self, step: Step) -> None:
        """After the forward: count what is stored, free what is done, tombstone what left the window.

        One call each for all requests: what a step costs the host must not grow with its requests.
        """
        free: list[int] = []
        evict: list[int] = []
        for request, length in zip(step.requests, step.query_lens, strict=True):
            request.computed += length
            request.done |= request.score_from is not None and not request.is_prefilling
            if request.done:
                free += self._release(request)
            else:
                evict += self._left_window(request)
        self.allocator.free(free)
        self.allocator.evict_window(evict)

    # -- inside ----------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self.waiting and self._free_rows:
            need = pages_for(self.waiting[0].longest, self.page_size)
            if need > self.allocator.available_pages() - self._reserved_pages:
                return
            request = self.waiting.popleft()
            request.row = self._free_rows.popleft()
            self._reserved_pages += need
            self.running.append(request)

    def _chunks(self, prefilling: list[Request]) -> tuple[list[Request], list[int]]:
        budget, chosen, lengths = self.chunk_tokens, [], []
        for request in prefilling:
            length = min(len(request.prompt) - request.computed, budget)
            if length == 0:
                break
            chosen.append(request)
            lengths.append(length)
            budget -= length
        return chosen, lengths

    def _step(self, mode: ForwardMode, requests: list[Request], query_lens: list[int]) -> Step:
        self._grow(requests, query_lens)
        rows: list[int] = []
        columns: list[int] = []
        slots: list[int] = []
        written: list[int] = []
        for request, length in zip(requests, query_lens, strict=True):
            for at in range(request.computed, request.computed + length):
                page, offset = divmod(at, self.page_size)
                rows.append(request.row)
                columns.append(at)
                slots.append(request.pages[page] * self.page_size + offset)
            first = request.computed // self.page_size
            written += request.pages[first : pages_for(request.computed + length, self.page_size)]
        placed = upload((rows, columns, slots), self.req_to_token.device)
        self.req_to_token[placed[0], placed[1]] = placed[2].to(torch.int32)
        return Step(
            mode=mode,
            requests=list(requests),
            query_lens=query_lens,
            virtual_write_ids=VirtualIds(placed[2]),
            written_pages=written,
        )

    def _grow(self, requests: list[Request], query_lens: list[int]) -> None:
        missing = [
            pages_for(request.computed + length, self.page_size) - len(request.pages)
            for request, length in zip(requests, query_lens, strict=True)
        ]
        pages = self.allocator.alloc(sum(missing))
        self._reserved_pages -= len(pages)
        for request, count in zip(requests, missing, strict=True):
            request.pages += pages[:count]
            del pages[:count]

    def _left_window(self, request: Request) -> list[int]:
        """Pages that no later query of the request sees: the next sits at `computed` and sees `window` positions."""
        if self.window is None:
            return []
        out_of_window = max(0, request.computed - self.window.window + 1) // self.page_size
        first, request.evicted_pages = request.evicted_pages, out_of_window
        return request.pages[first:out_of_window]

    def _release(self, request: Request) -> list[int]:
        """Take the request out of the batch; returns its pages, which the caller frees."""
        self._reserved_pages -= pages_for(request.longest, self.page_size) - len(request.pages)
        self._free_rows.append(request.row)
        self.running.remove(request)
        pages, request.pages = request.pages, []
        return pages
