"""A long run of the scheduler on a tiny pool, with everything that can go wrong at random, and no model.

`python -m suite.e2e.engine.soak STEPS`. Arrivals, lengths, shared beginnings, cancellations, rejected drafts,
packing and retraction come in random order; the integrity check runs all the while. In place of a forward, every new
token's identity is written into the pool's bytes, and before each step a sample of what running requests stored
before is read back through the page maps: a page that moved wrongly or was shared wrongly does not hold it.
"""

import json
import random
import sys
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from suite.e2e.engine.memory import RequestMemory
from suite.e2e.engine.pools import build_allocator
from suite.e2e.engine.requests import Request
from suite.e2e.engine.scheduler import Scheduler, Step
from suite.errors import InvariantError
from suite.kernels.allocators.paged import PageAllocator
from suite.kernels.batch import ForwardMode
from suite.kernels.geometry import KVGeometry, RunnerGeometry
from suite.kernels.ids import KVKind, VirtualIds
from suite.kernels.pools.state import StateGeometry
from suite.kernels.translator import KVIndexTranslator
from suite.records import PoolMode

PAGE_SIZE, WINDOW, CONTEXT, VOCAB = 4, 10, 64, 5
MAX_BATCH, CHUNK_TOKENS, DRAFTS = 6, 12, 3
CHECK_EVERY = 16


@dataclass
class Counts:
    """What happened."""

    steps: int = 0
    served: int = 0
    cancelled: int = 0
    retractions: int = 0
    cached_tokens: int = 0
    pages_moved: int = 0
    rows_read: int = 0


def tiny_geometry(*, window: bool, state: bool) -> RunnerGeometry:
    def pool(kind: KVKind, layer: int, reach: int | None) -> KVGeometry:
        return KVGeometry(
            kind=kind, layers=(layer,), kv_heads=1, head_dim=4, dtype=torch.float32, page_size=PAGE_SIZE, window=reach
        )

    slot = StateGeometry(layers=(2,), conv_dim=0, v_heads=1, v_dim=4, k_dim=4)
    return RunnerGeometry(
        full=pool(KVKind.FULL, 0, None),
        window=pool(KVKind.WINDOW, 1, WINDOW) if window else None,
        state=slot if state else None,
    )


class Soak:
    """One soak. `limited`: requests and cache have a limit of pages; otherwise only the pool's bytes limit them."""

    def __init__(
        self, mode: PoolMode, seed: int, *, window: bool = True, state: bool = False, limited: bool = True
    ) -> None:
        self.random = random.Random(seed)
        geometry, pages = tiny_geometry(window=window, state=state), 24
        self.allocator: PageAllocator = build_allocator(
            geometry, mode, pages, CONTEXT, "cpu", slots=MAX_BATCH + 4, poison=True
        )
        self.table = torch.zeros(MAX_BATCH + 1, CONTEXT + DRAFTS + PAGE_SIZE, dtype=torch.int32)
        self.translator = KVIndexTranslator(pool=self.allocator.pool, allocator=self.allocator, req_to_token=self.table)
        self.memory = RequestMemory(
            self.allocator,
            self.table,
            slots=self.allocator.slots,
            req_to_slot=torch.zeros(MAX_BATCH + 1, dtype=torch.int64),
            limit=pages if limited else None,
            look_ahead=DRAFTS,
            chunk_tokens=CHUNK_TOKENS,
            prefix_cache=True,
            snapshot_tokens=2 * PAGE_SIZE,
            max_snapshots=4,
        )
        self.scheduler = Scheduler(
            self.memory, max_batch=MAX_BATCH, chunk_tokens=CHUNK_TOKENS, mixed=True, draft_tokens=DRAFTS
        )
        self.counts = Counts()

    def run(self, steps: int) -> Counts:
        """`steps` steps with arrivals, then without until nobody is left; every page is accounted for at the end."""
        scheduler = self.scheduler
        while self.counts.steps < steps or scheduler.has_work:
            if self.counts.steps < steps:
                self._arrive()
                self._cancel()
            if not scheduler.has_work:
                continue
            if self.random.random() < 0.3:
                self.allocator.compact()
            self._step(scheduler.next_step())
            self.counts.steps += 1
            if self.counts.steps % CHECK_EVERY == 0:
                self.allocator.check()
                self.memory.check(scheduler.running)
        self.memory.clear()
        self.allocator.check()
        if live := self.allocator.live_pages(KVKind.FULL):
            raise InvariantError(f"live pages {live} != 0 after the last request")
        if (slots := self.allocator.slots) is not None and slots.available_slots() < MAX_BATCH:
            raise InvariantError(f"available slots {slots.available_slots()} < {MAX_BATCH} after the last request")
        self.counts.retractions, self.counts.pages_moved = scheduler.retractions, self.allocator.pages_moved
        return self.counts

    # -- inside ----------------------------------------------------------------------------------

    def _arrive(self) -> None:
        rng = self.random
        while len(self.scheduler.waiting) < 4 and rng.random() < 0.5:
            beginning = [rng.randrange(2)] * rng.choice((0, 8, 16, 24))  # two families share their beginnings
            prompt = beginning + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 16))]
            request = Request(prompt=prompt, max_new_tokens=rng.randrange(1, CONTEXT - len(prompt)))
            request.cancel_after = rng.choice((None, None, None, rng.randrange(1, 20)))
            self.scheduler.add(request)

    def _cancel(self) -> None:
        alive = [*self.scheduler.running, *self.scheduler.waiting]
        if alive and self.random.random() < 0.01:
            self.scheduler.cancel(self.random.choice(alive))
            self.counts.cancelled += 1

    def _step(self, step: Step) -> None:
        self._read_back(step.requests)
        self.allocator.begin_forward(step.written_pages, [request.slot for request in step.requests])
        stored = []
        for request, length in zip(step.requests, step.query_lens, strict=True):
            before = len(request.tokens)
            if request.computed + length >= before:
                said = self.random.randrange(1, length + 1) if step.mode is ForwardMode.VERIFY else 1
                while said and not request.done:
                    request.accept(self.random.randrange(VOCAB))
                    said -= 1
            stored.append(len(request.tokens) - before if step.mode is ForwardMode.VERIFY else length)
        self._write(step)
        if self.random.random() < 0.2:
            self.allocator.compact()  # while the forward is in flight
        self.allocator.end_forward()
        self.counts.served += sum(request.done for request in step.requests)
        self.counts.cached_tokens += sum(r.cached_tokens for r in step.requests if r.done)
        self.scheduler.finish(step, stored)

    def _write(self, step: Step) -> None:
        """The stamp of every new token into its row, as a forward would write keys."""
        stamps = []
        for request, length in zip(step.requests, step.query_lens, strict=True):
            known = request.tokens[: request.computed + length]
            known = known + [VOCAB] * (request.computed + length - len(known))  # rejected drafts
            stamps += prefix_stamps(known)[request.computed :]
        rows = torch.tensor(stamps, dtype=torch.float32)[:, None, None].repeat(1, 1, 4)
        pool, ids = self.allocator.pool, step.virtual_write_ids
        pool.write(0, self.translator.write_loc(ids), rows, rows)
        if (window := self.translator.sliding_window_write_loc_for(ids)) is not None:
            pool.write(1, window, rows, rows)

    def _read_back(self, requests: list[Request]) -> None:
        """What the step's requests stored before, as a kernel would find it: full rows, and those of the window."""
        pool = self.allocator.pool
        for request in requests:
            if not request.computed:
                continue
            want = torch.tensor(prefix_stamps(request.tokens[: request.computed]), dtype=torch.float32)
            ids = VirtualIds(self.table[request.row, : request.computed].long())
            self._compare(pool.k_view(0)[self.translator.write_loc(ids).tensor], want, request)
            if (window := self.translator.sliding_window_write_loc_for(ids)) is not None:
                first = max(0, request.computed - WINDOW + 1)
                self._compare(pool.k_view(1)[window.tensor[first:]], want[first:], request)

    def _compare(self, rows: torch.Tensor, want: torch.Tensor, request: Request) -> None:
        self.counts.rows_read += len(want)
        if not torch.equal(rows[:, 0, 0], want):
            bad = int((rows[:, 0, 0] != want).nonzero()[0])
            raise InvariantError(
                f"step {self.counts.steps}: row {bad} of {len(want)} of a request at {request.computed} holds "
                f"{float(rows[bad, 0, 0])} != {float(want[bad])}"
            )


def prefix_stamps(tokens: list[int]) -> list[float]:
    """A number per position that depends on all tokens up to it, exact in fp32: equal prefixes may share their rows."""
    stamps, value = [], 1
    for token in tokens:
        value = (value * 31 + token + 1) % 16_777_213
        stamps.append(float(value))
    return stamps


def main(arguments: list[str]) -> int:
    steps = int(arguments[0]) if arguments else 100_000
    kinds: list[dict[str, Any]] = [
        {"mode": mode, "window": window, "state": state, "limited": limited}
        for mode in ("static", "unified", "unified_token_major")
        for window, state in ((True, False), (False, True), (True, True))
        for limited in (True, False)
    ]
    for seed, kind in enumerate(kinds):
        counts = Soak(kind.pop("mode"), seed, **kind).run(steps // len(kinds) + 1)
        print(json.dumps({"seed": seed, **kind, **asdict(counts)}), flush=True)
    return 0


if __name__ == "__main__":
    np.seterr(all="raise")
    sys.exit(main(sys.argv[1:]))
