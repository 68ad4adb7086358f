"""A small runner that serves attention layers without a model: real pool, allocator, translator, batch and backend.

Its script has what hides and shows faults: chunked prefill, pages that move between all steps, a batch that
shrinks inside its captured size, a request that leaves and one that takes over its pages, lengths around page and
window ends. Both arms draw the same numbers in the same order. Beside the pool stand dense tensors of all rows ever
written, from which attention is computed again without an id of any kind.
"""

from dataclasses import dataclass, field, replace

import torch

from suite.e2e.engine.churn import Churn
from suite.e2e.faults.detection.proofs import Proofs
from suite.e2e.faults.detection.signals import signal_of
from suite.e2e.faults.fault import Signal
from suite.kernels.allocators.paged import PageAllocator, StaticAllocator
from suite.kernels.allocators.window import UnifiedAllocator
from suite.kernels.attention.base import Metadata
from suite.kernels.attention.support import backend_class
from suite.kernels.batch import ForwardBatch, ForwardMode
from suite.kernels.geometry import AttentionLayer, RunnerGeometry, bytes_for_pages, pages_for
from suite.kernels.ids import VirtualIds
from suite.kernels.pools.static import StaticPool
from suite.kernels.pools.unified import UNIFIED_POOLS
from suite.kernels.translator import KVIndexTranslator
from suite.records import Launcher, PoolMode

Q_HEADS, KV_HEADS, HEAD_DIM, WINDOW = 4, 2, 16, 10
ROWS, CONTEXT, LANES = 5, 48, 4
Work = dict[int, int]  # request row -> new tokens


@dataclass(frozen=True, kw_only=True)
class RigConfig:
    """What is served. Layers 0 and 2 are full, 1, 3 and 4 see a window: the two multipliers differ.

    With `overlap` pages are freed, moved and taken between the planning of a forward and the forward itself: the
    worst order in which a scheduler that runs ahead of its stream may find them.
    """

    mode: PoolMode = "unified"
    backend: str = "reference"
    launcher: Launcher = "reference"
    page_size: int = 4
    window: int | None = WINDOW
    sinks: bool = True
    graph: bool = True
    poison: bool = True
    overlap: bool = False
    churn: bool = True
    dtype: torch.dtype = torch.float32
    seed: int = 0
    device: str = "cpu"


@dataclass(kw_only=True)
class Forward:
    """One forward of one layer: which rows of which request asked, and what came back."""

    layer: AttentionLayer
    spans: list[tuple[int, int, int]]  # (request, first position, end)
    q: torch.Tensor
    out: torch.Tensor


@dataclass(kw_only=True)
class RigRun:
    """What a script came to. `memory` holds all K and V by (layer, request)."""

    forwards: list[Forward] = field(default_factory=list)
    findings: list[Signal] = field(default_factory=list)
    memory: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    requests: int = 0
    moved_share: float = 0.0
    observed: int = 0
    crashed: bool = False


class Rig:
    """One arm. Requests are numbered on; each sits on a row of `req_to_token` while it lives."""

    def __init__(self, config: RigConfig) -> None:
        self.config = config
        self.random = torch.Generator().manual_seed(config.seed)
        self.layers = [self._layer(index) for index in ((0, 1, 2, 3, 4) if config.window else (0, 2))]
        self.geometry = RunnerGeometry.from_layers(self.layers, config.dtype, config.page_size)
        request_pages = LANES * (pages_for(CONTEXT, config.page_size) + 1)
        self.allocator = self._allocator(request_pages + Churn.ballast_pages(request_pages))
        self.churn = Churn(self.allocator, request_pages, config.seed)
        table = torch.zeros(ROWS + 1, CONTEXT, dtype=torch.int32, device=config.device)
        self.translator = KVIndexTranslator(pool=self.allocator.pool, allocator=self.allocator, req_to_token=table)
        cls = backend_class(config.backend)
        self.backend = cls(
            pool=self.allocator.pool, translator=self.translator, launcher=config.launcher, sinks=config.sinks
        )
        self.proofs = Proofs(self.allocator, config.page_size)
        self.run = RigRun()
        self.steps = 0
        self.lengths: dict[int, int] = {}
        self.pages: dict[int, list[int]] = {}
        self.evicted: dict[int, int] = {}
        self.request: dict[int, int] = {}  # row -> number of the request on it
        self.captured: dict[int, Metadata] = {}
        if config.graph:
            self.backend.capture(LANES)
            self.captured = {lanes: self.backend.replay(self._batch({}, lanes)) for lanes in (LANES, 2)}

    # -- the script ------------------------------------------------------------------------------

    def serve(self) -> RigRun:
        """Run the script to its end, or to its crash, which is a finding."""
        try:
            self._script()
            self.churn.finish()
            self._check()
        except Exception as error:  # a child would end as a crashed row here; the signal says of what
            self.run.findings.append(signal_of(error))
            self.run.crashed = True
        self.run.moved_share, self.run.observed = self.churn.moved_share, self.churn.observed
        return self.run

    def _script(self) -> None:
        self.step({1: 13, 2: 5, 3: 9})
        self.step({1: 6, 4: 21})
        for _ in range(3):
            self.step({1: 1, 2: 1, 3: 1, 4: 1})
        self.release(3)
        for _ in range(2):
            self.step({4: 1, 1: 1, 2: 1})
        self.step({5: 17, 2: 2})
        self.release(1)
        for _ in range(4):
            self.step({2: 1, 5: 1, 4: 1})
        self.step({5: 1})
        self.step({4: 1, 2: 1})

    def step(self, work: Work) -> None:
        """Churn, then one forward of all layers over `work`, then window eviction."""
        self.steps += 1
        if self.config.churn and not (self.config.overlap and self.steps % 2):  # else nothing is left to move in flight
            self.churn.shuffle()
        self.churn.observe([page for row in work for page in self.pages.get(row, [])])
        lanes = 0
        if self.config.graph and set(work.values()) == {1}:
            lanes = min(size for size in self.captured if size >= len(work))
        batch = self._batch(work, lanes)
        if lanes:
            self.backend.replay(batch)
            metadata = self.captured[lanes]  # what a graph reads: the addresses of its capture
        else:
            metadata = self.backend.plan(batch)
        live = [(self.request[row], self.lengths[row] - new, self.lengths[row]) for row, new in work.items()]
        self._note(self.proofs.metadata(metadata, batch, [self.pages[row] for row in work]))
        if self.config.overlap:
            self._run_ahead(work)
        for layer in self.layers:
            self._attend(layer, live, batch.input_ids.numel(), metadata)
        if self.config.overlap:
            self.allocator.end_forward()
        self._evict(work)
        self._check()

    def release(self, row: int) -> None:
        self.allocator.free(self.pages.pop(row))
        for books in (self.lengths, self.evicted, self.request):
            del books[row]

    # -- inside ----------------------------------------------------------------------------------

    def _run_ahead(self, work: Work) -> None:
        """What the scheduler does while the forward is in flight: frees, packs, and binds pages for the next step."""
        size = self.config.page_size
        written = [self.pages[row][page] for row, new in work.items() for page in self._touched(row, new, size)]
        self.allocator.begin_forward(written)
        if self.config.churn:
            self.churn.shuffle()

    def _touched(self, row: int, new: int, size: int) -> range:
        return range((self.lengths[row] - new) // size, pages_for(self.lengths[row], size))

    def _attend(self, layer: AttentionLayer, live: list[tuple[int, int, int]], tokens: int, metadata: Metadata) -> None:
        q, k, v = (self._randn(tokens, heads) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
        at = 0
        for request, first, end in live:
            key = (layer.index, request)
            empty = k[:0]
            old_k, old_v = self.run.memory.get(key, (empty, empty))
            mine = slice(at, at + end - first)
            self.run.memory[key] = torch.cat([old_k, k[mine]]), torch.cat([old_v, v[mine]])
            at += end - first
        out = self.backend.forward(layer, q, k, v, metadata)
        self.run.forwards.append(Forward(layer=layer, spans=live, q=q[:at], out=out[:at].clone()))

    def _batch(self, work: Work, lanes: int) -> ForwardBatch:
        size, written = self.config.page_size, [torch.zeros(0, dtype=torch.int64, device=self.config.device)]
        for row, new in work.items():
            self._grow(row, new)
            start, end = self.lengths[row] - new, self.lengths[row]
            position = torch.arange(start, end, device=self.config.device)
            page = torch.tensor(self.pages[row], device=self.config.device)
            ids = page[position // size] * size + position % size
            self.translator.req_to_token[row, start:end] = ids.int()
            written.append(ids)
        padding = max(0, lanes - len(work))
        written.append(torch.zeros(padding, dtype=torch.int64, device=self.config.device))
        lengths, news = [*(self.lengths[row] for row in work), *[1] * padding], [*work.values(), *[1] * padding]
        return ForwardBatch.create(
            mode=ForwardMode.DECODE if set(news) == {1} else ForwardMode.EXTEND,
            input_ids=[0] * sum(news),
            req_rows=[*work, *[0] * padding],
            seq_lens=lengths,
            query_lens=news,
            virtual_write_ids=VirtualIds(torch.cat(written)),
            translator=self.translator,
        )

    def _grow(self, row: int, new: int) -> None:
        if row not in self.pages:
            self.pages[row], self.lengths[row], self.evicted[row] = [], 0, 0
            self.request[row] = self.run.requests
            self.run.requests += 1
        self.lengths[row] += new
        pages = self.allocator.alloc(pages_for(self.lengths[row], self.config.page_size) - len(self.pages[row]))
        self._note(self.proofs.cleared(pages))
        self.pages[row] += pages

    def _evict(self, work: Work) -> None:
        if self.config.window is None:
            return
        for row in work:
            out = max(0, self.lengths[row] - self.config.window + 1) // self.config.page_size
            self.allocator.evict_window(self.pages[row][self.evicted[row] : out])
            self.evicted[row] = out

    def _check(self) -> None:
        try:
            self.allocator.check()
        except Exception as error:
            self._note(signal_of(error))

    def _note(self, found: Signal | None) -> None:
        if found is not None:
            self.run.findings.append(found)

    def _randn(self, tokens: int, heads: int) -> torch.Tensor:
        values = torch.randn(tokens, heads, HEAD_DIM, generator=self.random)
        return values.to(self.config.dtype).to(self.config.device)

    def _layer(self, index: int) -> AttentionLayer:
        sinks = torch.randn(Q_HEADS, generator=self.random).to(self.config.device)
        return AttentionLayer(
            index=index,
            q_heads=Q_HEADS,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            scale=HEAD_DIM**-0.5,
            window=None if index in (0, 2) else self.config.window,
            sinks=sinks if self.config.sinks else None,
        )

    def _allocator(self, pages: int) -> PageAllocator:
        config = self.config
        if config.mode == "static":
            counts: dict[str, int] = {pool.kind: pages + 1 for pool in self.geometry.pools}
            return StaticAllocator(StaticPool(self.geometry, counts, config.device, poison=config.poison))
        size = bytes_for_pages(self.geometry, config.mode, pages)
        pool = UNIFIED_POOLS[config.mode](self.geometry, size, CONTEXT, config.device, poison=config.poison)
        return UnifiedAllocator(pool)


def static_twin(config: RigConfig) -> RigConfig:
    """The reference arm of `config`."""
    return replace(config, mode="static", overlap=False)
