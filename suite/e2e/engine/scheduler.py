"""Continuous batching over virtual ids: who runs next, with how many tokens, and who has to step back.

Time is counted in steps, so both arms see the same arrivals. Prefill goes first, in chunks of a token budget,
either alone or `mixed` with one token of every decoding request; without a prefill every request decodes one token,
or verifies `draft_tokens` drafts. When room runs short the youngest request is retracted: it gives everything back,
keeps its tokens and computes them again later. The scheduler never sees a kernel id.
"""

from collections import deque
from dataclasses import dataclass, field, replace

from suite.e2e.engine.memory import RequestMemory
from suite.e2e.engine.requests import Request
from suite.errors import InputError, InvariantError
from suite.kernels.batch import ForwardMode
from suite.kernels.ids import VirtualIds


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One forward to run: the requests, how many new tokens of each, and where those are stored.

    `input_ids`: the new tokens, requests in order; `seq_lens` include them. The tokens of a verify come in when
    they are drafted, by `with_drafts`: the newest token of each request, its drafts, and 0 up to `query_lens`.
    """

    mode: ForwardMode
    requests: list[Request]
    query_lens: list[int]
    seq_lens: list[int]
    input_ids: list[int]
    virtual_write_ids: VirtualIds
    written_pages: list[int]
    drafts: list[list[int]] = field(default_factory=list)

    def with_drafts(self, drafts: list[list[int]]) -> "Step":
        ids: list[int] = []
        for request, length, mine in zip(self.requests, self.query_lens, drafts, strict=True):
            ids += [request.tokens[-1], *mine, *[0] * (length - 1 - len(mine))]
        return replace(self, input_ids=ids, drafts=drafts)

    def block(self, width: int) -> "Step":
        """The pass of a block draft: `width` tokens in every request's window, its newest one first, then 0."""
        slots = self.virtual_write_ids.tensor.view(len(self.requests), -1)[:, :width]
        return replace(
            self,
            query_lens=[width] * len(self.requests),
            seq_lens=[request.computed + width for request in self.requests],
            input_ids=[token for request in self.requests for token in (request.tokens[-1], *[0] * (width - 1))],
            virtual_write_ids=VirtualIds(slots.flatten()),
        )

    def place(self, place: int, tokens: list[int]) -> "Step":
        """The decode step of a draft model that stores `tokens` at place `place` of every request's window."""
        slots = self.virtual_write_ids.tensor.view(len(self.requests), -1)[:, place]
        return replace(
            self,
            mode=ForwardMode.DECODE,
            query_lens=[1] * len(self.requests),
            seq_lens=[request.computed + place + 1 for request in self.requests],
            input_ids=tokens,
            virtual_write_ids=VirtualIds(slots.contiguous()),
        )


class Scheduler:
    """Admits up to `max_batch` requests, first come, first served. `draft_tokens`: 0 without speculation."""

    def __init__(
        self, memory: RequestMemory, *, max_batch: int, chunk_tokens: int, mixed: bool = False, draft_tokens: int = 0
    ) -> None:
        for name, value in (("max_batch", max_batch), ("chunk_tokens", chunk_tokens)):
            if value < 1:
                raise InputError(name, value, "a positive number")
        if mixed and chunk_tokens <= max_batch:
            raise InputError("chunk_tokens", chunk_tokens, f"above {max_batch}, one token of every decoding request")
        self.memory, self.chunk_tokens, self.mixed, self.draft_tokens = memory, chunk_tokens, mixed, draft_tokens
        self.clock = 0  # steps so far, and those in which nobody was there
        self.waiting: deque[Request] = deque()  # by arrival; retracted ones first
        self.running: list[Request] = []  # by admission, the youngest last
        self.retractions = self.largest_batch = 0
        self._free_rows = deque(range(1, max_batch + 1))  # row 0 is the padding request

    def add(self, request: Request) -> None:
        """Queue a request, behind all that arrive before it. InputError for one that no empty pool could hold."""
        memory, field_name = self.memory, "prompt_tokens + max_new_tokens"
        limit = memory.req_to_token.shape[1] - memory.look_ahead
        if request.longest > limit:
            raise InputError(field_name, request.longest, f"at most {limit}, the longest context")
        if memory.longest_pages(request) > (most := memory.most_pages()):
            expected = f"at most {most * memory.page_size - memory.look_ahead}, what the pool holds of one request"
            raise InputError(field_name, request.longest, expected)
        at = len(self.waiting)
        while at and self.waiting[at - 1].arrival_step > request.arrival_step:
            at -= 1
        self.waiting.insert(at, request)

    def cancel(self, request: Request) -> None:
        """End a request between two steps, wherever it is."""
        request.done = True
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self._take_out([request])

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def next_step(self) -> Step:
        """Admit, choose, make room, place. InvariantError when nothing can run although work is left."""
        if not self.running and self.waiting:
            self.clock = max(self.clock, self.waiting[0].arrival_step)
        self._admit()
        while self.running:
            mode, requests, query_lens = self._choose()
            if self._make_room(requests, query_lens):
                self.largest_batch = max(self.largest_batch, len(self.running))
                return self._step(mode, requests, query_lens)
        raise InvariantError(f"{len(self.waiting)} requests wait, none runs, {self.memory.headroom()} pages available")

    def finish(self, step: Step, stored: list[int] | None = None) -> None:
        """After the forward: count what is stored (of a verify: what was accepted), let go of what is done."""
        prefilled: list[Request] = []
        for request, length in zip(step.requests, stored or step.query_lens, strict=True):
            if step.mode is ForwardMode.EXTEND and (length > 1 or request.computed < len(request.prompt)):
                prefilled.append(request)
            request.computed += length
            request.done |= request.score_from is not None and request.computed >= len(request.prompt)
        self.clock += 1
        # before anything leaves the window: the cache keeps window rows of its own until room is short
        self.memory.keep(prefilled)
        self.memory.snapshot(step.requests)
        self._take_out([request for request in step.requests if request.done])
        self.memory.leave_window([request for request in step.requests if not request.done])

    # -- inside ----------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self.waiting and self._free_rows and self.waiting[0].arrival_step <= self.clock:
            request = self.waiting[0]
            if not self.memory.attach(request, self._free_rows[0], self.running):
                return
            self._free_rows.popleft()
            self.waiting.popleft()
            if request.first_step is None:
                request.first_step = self.clock
            self.running.append(request)

    def _choose(self) -> tuple[ForwardMode, list[Request], list[int]]:
        decoding = [request for request in self.running if request.is_decoding]
        if len(decoding) == len(self.running):
            mode = ForwardMode.VERIFY if self.draft_tokens else ForwardMode.DECODE
            return mode, decoding, [1 + self.draft_tokens] * len(decoding)
        chosen = decoding if self.mixed else []
        lengths = [1] * len(chosen)
        budget = self.chunk_tokens - len(chosen)
        for request in self.running:
            if budget and not request.is_decoding:
                length = self._chunk(request, budget)
                chosen.append(request)
                lengths.append(length)
                budget -= length
        return ForwardMode.EXTEND, chosen, lengths

    def _chunk(self, request: Request, budget: int) -> int:
        """Tokens of the next chunk; it ends at the last block end within, where a state is to be kept."""
        length = min(len(request.tokens) - request.computed, budget)
        if (block := self.memory.snapshot_tokens) and request.score_from is None:
            to_block_end = (request.computed + length) // block * block - request.computed
            return to_block_end if to_block_end > 0 else length
        return length

    def _make_room(self, requests: list[Request], query_lens: list[int]) -> bool:
        """Evict, else retract the youngest; False when somebody was retracted and the choice is void."""
        memory = self.memory
        need = sum(memory.missing_pages(r, r.computed + n) for r, n in zip(requests, query_lens, strict=True))
        if memory.make_room(need):
            return True
        if len(self.running) == 1:
            raise InvariantError(f"{need} pages asked for the only request, {memory.headroom()} available")
        youngest = self.running[-1]
        self._leave([youngest])
        youngest.retractions += 1
        self.retractions += 1
        self.waiting.appendleft(youngest)
        return False

    def _step(self, mode: ForwardMode, requests: list[Request], query_lens: list[int]) -> Step:
        self.memory.grow(requests, query_lens)
        ids, written = self.memory.place(requests, query_lens)
        if mode is ForwardMode.EXTEND:
            chunks = [r.tokens[r.computed : r.computed + n] for r, n in zip(requests, query_lens, strict=True)]
            input_ids = [token for chunk in chunks for token in chunk]
        else:
            input_ids = [request.tokens[-1] for request in requests]
        return Step(
            mode=mode,
            requests=requests,
            query_lens=query_lens,
            seq_lens=[request.computed + n for request, n in zip(requests, query_lens, strict=True)],
            input_ids=input_ids,
            virtual_write_ids=ids,
            written_pages=written,
        )

    def _take_out(self, requests: list[Request]) -> None:
        for request in requests:
            request.last_step = self.clock
        self._leave(requests)

    def _leave(self, requests: list[Request]) -> None:
        for request in requests:
            self._free_rows.append(request.row)
            self.running.remove(request)
        self.memory.release(requests)
