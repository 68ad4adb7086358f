"""One model with its pool, allocator, translator and backend: what turns a scheduler step into logits."""

from dataclasses import dataclass
from typing import Protocol

import torch

from suite.e2e.engine.graphs import DecodeGraphs
from suite.e2e.engine.scheduler import Step
from suite.errors import KvproofError
from suite.kernels.allocators.paged import PageAllocator
from suite.kernels.attention.base import AttentionBackend, Metadata
from suite.kernels.batch import ForwardBatch, ForwardMode
from suite.kernels.geometry import AttentionLayer
from suite.kernels.ids import VirtualIds
from suite.kernels.translator import KVIndexTranslator
from suite.models.mixers import Mixers


class CausalModel(Protocol):
    """What the engine needs of a model."""

    attention_layers: list[AttentionLayer]
    max_positions: int

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, mixers: Mixers) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class PooledMixers:
    """The mixers of one forward over the runner's pools."""

    backend: AttentionBackend
    metadata: Metadata
    expands_latent: bool = False

    def attend(self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> torch.Tensor:
        return self.backend.forward(layer, q, k, v, self.metadata)

    def after_layer(self, index: int, residual: torch.Tensor) -> None:
        """No draft is fed."""


class NonFiniteLogitsError(KvproofError):
    """NaN or infinity in the logits: a row was read that nobody wrote."""


class Runner:
    """Runs steps eagerly, or decode steps captured when `graph` is set."""

    def __init__(
        self,
        model: CausalModel,
        allocator: PageAllocator,
        translator: KVIndexTranslator,
        backend: AttentionBackend,
        *,
        max_batch: int,
        graph: bool,
    ) -> None:
        self.model, self.allocator, self.translator, self.backend = model, allocator, translator, backend
        self.graphs = DecodeGraphs(self._logits_of_all, backend, self._padding, max_batch) if graph else None

    @torch.inference_mode()
    def forward(self, step: Step, rows: torch.Tensor) -> torch.Tensor:
        """fp32 logits [n, vocab] of the step's token rows `rows` [n]."""
        self.allocator.begin_forward(step.written_pages)
        if step.mode is ForwardMode.DECODE and self.graphs is not None:
            logits = self.graphs.run(self._batch(step, self.graphs.lanes_for(len(step.requests))))[rows]
        else:
            batch = self._batch(step, len(step.requests))
            logits = self.model.logits(self._hidden(batch.input_ids, batch.positions, self.backend.plan(batch))[rows])
        self.allocator.end_forward()
        if not bool(logits.isfinite().all()):
            bad = [i for i, row in enumerate(logits.isfinite().all(-1).tolist()) if not row]
            raise NonFiniteLogitsError(
                f"logits of {len(bad)} of {len(logits)} rows are not finite, the first is row {bad[0]}"
            )
        return logits

    # -- inside ----------------------------------------------------------------------------------

    def _hidden(self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: Metadata) -> torch.Tensor:
        return self.model(input_ids, positions, PooledMixers(self.backend, metadata))

    def _logits_of_all(self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: Metadata) -> torch.Tensor:
        return self.model.logits(self._hidden(input_ids, positions, metadata))

    def _batch(self, step: Step, lanes: int) -> ForwardBatch:
        """The step as a forward batch, padded to `lanes` with requests that read and write the sink only."""
        padding = [0] * (lanes - len(step.requests))
        written = step.virtual_write_ids.tensor
        return ForwardBatch.create(
            mode=step.mode,
            input_ids=step.input_ids + padding,
            req_rows=[request.row for request in step.requests] + padding,
            seq_lens=step.seq_lens + [1 for _ in padding],
            query_lens=step.query_lens + [1 for _ in padding],
            virtual_write_ids=VirtualIds(torch.cat([written, written.new_zeros(len(padding))]) if padding else written),
            translator=self.translator,
        )

    def _padding(self, lanes: int) -> ForwardBatch:
        return ForwardBatch.create(
            mode=ForwardMode.DECODE,
            input_ids=[0] * lanes,
            req_rows=[0] * lanes,
            seq_lens=[1] * lanes,
            query_lens=[1] * lanes,
            virtual_write_ids=VirtualIds(torch.zeros(lanes, dtype=torch.int64, device=self.backend.pool.device)),
            translator=self.translator,
        )
