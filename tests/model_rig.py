"""Runs any model through the real pools: allocator, translator, reference backends, state slots.

Requests are prefilled in chunks and then decode token by token beside each other, in fp32, from a poisoned pool
whose pages move between forwards. What comes back are the logits after every token, so that a test can hold
them against a model that was given the whole text at once.
"""

from dataclasses import dataclass

import torch

from suite.kernels.allocators.paged import PageAllocator, StaticAllocator
from suite.kernels.allocators.slots import SlotAllocator
from suite.kernels.allocators.window import UnifiedAllocator
from suite.kernels.attention.mla_prefill import MlaPrefill
from suite.kernels.attention.support import backend_class
from suite.kernels.batch import ForwardBatch, ForwardMode
from suite.kernels.geometry import AttentionLayer, RunnerGeometry, bytes_for_pages
from suite.kernels.ids import KVKind, VirtualIds
from suite.kernels.linear import linear_backend_class
from suite.kernels.linear.delta import DeltaInputs, DeltaLayer
from suite.kernels.linear.lightning import LightningInputs, LightningLayer
from suite.kernels.linear.stamp import LinearAttnFlags, resolve, stamp_runner
from suite.kernels.pools.state import StatePool, VirtualSlots
from suite.kernels.pools.static import StaticPool
from suite.kernels.pools.unified import UNIFIED_POOLS
from suite.kernels.translator import KVIndexTranslator
from suite.models.dense import DenseMixers
from suite.models.mixers import Expand

Row = int  # 1 on: row 0 of every table is padding


@dataclass
class PoolMixers:
    """The mixers of one forward over the rig's pools; remembers the residual stream after every layer."""

    rig: "ModelRig"
    batch: ForwardBatch
    attention: object
    linear: object
    expands_latent: bool

    def __post_init__(self) -> None:
        self.residuals: list[torch.Tensor] = []

    def attend(self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> torch.Tensor:
        return self.rig.backend.forward(layer, q, k, v, self.attention)

    def attend_expanded(
        self, layer: AttentionLayer, q: torch.Tensor, rows: torch.Tensor, expand: Expand, scale: float
    ) -> torch.Tensor:
        return self.rig.expanded.forward(layer.index, self.batch, q, rows, scale, expand)

    def recur(self, layer: DeltaLayer | LightningLayer, inputs: DeltaInputs | LightningInputs) -> torch.Tensor:
        return self.rig.linear.forward(layer, inputs, self.linear)

    def after_layer(self, index: int, residual: torch.Tensor) -> None:
        assert index == len(self.residuals)
        self.residuals.append(residual)


class ModelRig:
    """One model on one pool. `expanded`: prefill latent layers on expanded keys (`attend_expanded`)."""

    def __init__(
        self,
        model,
        mode: str = "unified",
        *,
        requests: int = 3,
        context: int = 160,
        page_size: int = 4,
        dtype: torch.dtype = torch.float32,
        expanded: bool = False,
    ) -> None:
        self.model, self.mode, self.page_size = model, mode, page_size
        self.runner = type("Runner", (), {})()
        stamp_runner(self.runner, resolve(LinearAttnFlags()))
        self.allocator = self._allocator(mode, requests, context, dtype)
        pool = self.allocator.pool
        sinks = any(layer.sinks is not None for layer in model.attention_layers)
        table = torch.zeros(requests + 1, -(-context // page_size) * page_size, dtype=torch.int32)
        self.translator = KVIndexTranslator(pool=pool, allocator=self.allocator, req_to_token=table)
        self.backend = backend_class("reference")(
            pool=pool, translator=self.translator, launcher="reference", sinks=sinks
        )
        self.expanded = (
            MlaPrefill(pool=pool, translator=self.translator, launcher="reference", chunk_tokens=16)
            if expanded
            else None
        )
        self.slots, self.linear = None, None
        if (geometry := model.state_geometry(dtype)) is not None:
            self._build_states(geometry, requests)
        self.pages: dict[Row, list[int]] = {}
        self.lengths: dict[Row, int] = {}
        self.slot: dict[Row, int] = {}
        self.mixers: PoolMixers | None = None  # of the last forward

    def _allocator(self, mode: str, requests: int, context: int, dtype: torch.dtype) -> PageAllocator:
        geometry = RunnerGeometry.from_layers(self.model.attention_layers, dtype, self.page_size)
        pages = 4 + 2 * requests * -(-context // self.page_size)  # as many again, so that survivors can move
        if mode == "static":
            return StaticAllocator(StaticPool(geometry, {kv.kind: pages for kv in geometry.pools}, "cpu", poison=True))
        size = bytes_for_pages(geometry, mode, pages)
        return UnifiedAllocator(UNIFIED_POOLS[mode](geometry, size, context, "cpu", poison=True))

    def _build_states(self, geometry, requests: int) -> None:
        count = 2 * requests
        if self.mode == "static":
            states = StatePool.static(geometry, count, "cpu", poison=True)
        else:
            buffer = torch.zeros((count + 1) * geometry.slot_bytes, dtype=torch.uint8)
            states = StatePool.strided(geometry, count, buffer, poison=True)
        self.slots = SlotAllocator(states)
        self.slots.alloc(1)  # so that no request's slot is its row
        self.linear = linear_backend_class(self.model.linear_family)(
            runner=self.runner, pool=states, launcher="reference"
        )

    def forward(self, work: dict[Row, list[int]]) -> dict[Row, torch.Tensor]:
        """One forward over the new tokens of each row -> fp32 logits [new tokens, vocab] of each."""
        batch = self._batch(work)
        linear = None
        if self.slots is not None:
            slots = VirtualSlots(torch.tensor([self.slot[row] for row in work]))
            linear = self.linear.plan(batch, self.slots.kernel_slots(slots))
        expands = self.expanded is not None and batch.mode is ForwardMode.EXTEND
        self.mixers = PoolMixers(self, batch, self.backend.plan(batch), linear, expands)
        with torch.no_grad():
            logits = self.model.logits(self.model(batch.input_ids, batch.positions, self.mixers))
        self._evict(work)
        return dict(zip(work, logits.split([len(new) for new in work.values()]), strict=True))

    def _batch(self, work: dict[Row, list[int]]) -> ForwardBatch:
        written = []
        for row, new in work.items():
            start = self.lengths.setdefault(row, 0)
            end = start + len(new)
            pages = self.pages.setdefault(row, [])
            pages += self.allocator.alloc(-(-end // self.page_size) - len(pages))
            if self.slots is not None and row not in self.slot:
                (self.slot[row],) = self.slots.alloc(1)
            position = torch.arange(start, end)
            ids = torch.tensor(pages)[position // self.page_size] * self.page_size + position % self.page_size
            self.translator.req_to_token[row, start:end] = ids.to(torch.int32)
            self.lengths[row] = end
            written.append(ids)
        decodes = all(len(new) == 1 for new in work.values())
        return ForwardBatch.create(
            mode=ForwardMode.DECODE if decodes else ForwardMode.EXTEND,
            input_ids=[token for new in work.values() for token in new],
            req_rows=list(work),
            seq_lens=[self.lengths[row] for row in work],
            query_lens=[len(new) for new in work.values()],
            virtual_write_ids=VirtualIds(torch.cat(written)),
            translator=self.translator,
        )

    def _evict(self, work: dict[Row, list[int]]) -> None:
        window = self.allocator.pool.geometry.window
        if window is None:
            return
        page_map = self.allocator.page_map(KVKind.WINDOW)
        for row in work:
            gone = max(0, self.lengths[row] - window.window + 1) // self.page_size
            self.allocator.evict_window([page for page in self.pages[row][:gone] if int(page_map[page]) > 0])

    def release(self, row: Row) -> None:
        """The request is done; its pages and slot are free and poisoned."""
        self.allocator.free(self.pages.pop(row))
        del self.lengths[row]
        if self.slots is not None:
            self.slots.free([self.slot.pop(row)])

    def shuffle(self) -> None:
        """Make pages move: hold some, let go of those below what lives, pack."""
        if self.mode != "static":
            self.allocator.compact(urgent=True)

    def run(self, texts: list[list[int]], prompts: list[int], chunk: int) -> list[torch.Tensor]:
        """Serve the texts together, request i's first prompts[i] tokens in chunks and the rest one by one.

        A request before them is served and freed, so that pages lie apart and move. Returns the logits after
        every token of every text, fp32 [tokens, vocab].
        """
        first = len(texts) + 1
        self.forward({first: texts[0][: 2 * self.page_size]})
        found: dict[Row, list[torch.Tensor]] = {row: [] for row in range(1, len(texts) + 1)}
        while work := self._next_work(texts, prompts, chunk):
            for row, logits in self.forward(work).items():
                found[row].append(logits)
            if first in self.pages:
                self.release(first)
            self.shuffle()
        return [torch.cat(found[row]) for row in sorted(found)]

    def _next_work(self, texts: list[list[int]], prompts: list[int], chunk: int) -> dict[Row, list[int]]:
        """Prompts first; decodes once all are in."""
        at = {row: self.lengths.get(row, 0) for row in range(1, len(texts) + 1)}
        chunks = {row: texts[row - 1][done : min(done + chunk, prompts[row - 1])] for row, done in at.items()}
        if prefill := {row: new for row, new in chunks.items() if new}:
            return prefill
        decodes = {row: texts[row - 1][done : done + 1] for row, done in at.items()}
        return {row: new for row, new in decodes.items() if new}


def dense_logits(model, text: list[int], *, expands_latent: bool = False) -> torch.Tensor:
    """The whole text at once, without any pool: fp32 [tokens, vocab]."""
    ids = torch.tensor(text)
    with torch.no_grad():
        return model.logits(model(ids, torch.arange(len(ids)), DenseMixers(1, expands_latent=expands_latent)))


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest difference over the largest exact value."""
    return float((got.double() - exact.double()).abs().max() / exact.double().abs().max())


def ragged_texts(vocab: int, lengths: list[int], seed: int = 5) -> list[list[int]]:
    """One random text per length."""
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (length,), generator=random).tolist() for length in lengths]


def assert_pools_agree(model, vocab: int, *, window: int = 8, chunk: int = 8, expanded: bool = False) -> None:
    """In every pool mode, prompts around the window and the chunk and 6 decodes after give the dense logits."""
    prompts = [1, window - 1, window, window + 1, 2 * chunk + 1, 70]
    texts = ragged_texts(vocab, [prompt + 6 for prompt in prompts])
    exact = [dense_logits(model, text) for text in texts]
    for mode in ("static", "unified"):
        rig = ModelRig(model, mode, requests=len(texts) + 1, context=96, expanded=expanded)
        for text, got, want in zip(texts, rig.run(texts, prompts, chunk), exact, strict=True):
            assert got.isfinite().all(), f"{mode}: {len(text)} tokens: not finite"
            error = relative_error(got, want)
            assert error <= 1e-4, f"{mode}: {len(text)} tokens: relative error {error:.1e}"
