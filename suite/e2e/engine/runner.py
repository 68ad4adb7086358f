"""One model with its pool, allocator, translator and backends: what turns a scheduler step into logits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch

from suite.e2e.engine.graphs import CapturedStep, Forwarded, StepGraphs
from suite.e2e.engine.mixers import PooledMixers
from suite.e2e.engine.scheduler import Step
from suite.errors import InvariantError, KvproofError
from suite.kernels.allocators.paged import PageAllocator
from suite.kernels.allocators.slots import SlotAllocator
from suite.kernels.attention.base import AttentionBackend, Metadata
from suite.kernels.attention.mla_prefill import MlaPrefill
from suite.kernels.batch import ForwardBatch, ForwardMode
from suite.kernels.geometry import AttentionLayer
from suite.kernels.ids import VirtualIds
from suite.kernels.linear import linear_backend_class
from suite.kernels.linear.metadata import LinearMetadata
from suite.kernels.linear.stamp import LinearAttnFlags, resolve, stamp_runner
from suite.kernels.pools.state import KernelSlots, StateGeometry, VirtualSlots
from suite.kernels.translator import KVIndexTranslator
from suite.kernels.upload import upload
from suite.models.mixers import Mixers


class CausalModel(Protocol):
    """What the engine needs of a model."""

    linear_family: ClassVar[str | None]

    @property
    def attention_layers(self) -> list[AttentionLayer]: ...

    @property
    def max_positions(self) -> int: ...

    def state_geometry(self, dtype: torch.dtype) -> StateGeometry | None: ...

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, mixers: Mixers) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class NonFiniteLogitsError(KvproofError):
    """NaN or infinity in the logits: a row was read that nobody wrote."""


@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """`draft_tokens`: drafts per verify, 0 without speculation. `feature_layers` feed a draft. `block_tokens`: of a
    block draft's pass, the only forward that its runner has; 0 for any other model. `expand_tokens`: prefix tokens of
    latent layers that a prefill may expand at once, 0 to attend to latent rows throughout."""

    max_batch: int
    graph: bool
    draft_tokens: int = 0
    feature_layers: tuple[int, ...] = ()
    block_tokens: int = 0
    linear_family: str | None = None
    linear_flags: LinearAttnFlags = field(default_factory=LinearAttnFlags)
    expand_tokens: int = 0

    @property
    def captured(self) -> dict[ForwardMode, int]:
        """New tokens per request of every mode that is captured."""
        if self.block_tokens:
            return {ForwardMode.VERIFY: self.block_tokens}
        verify = {ForwardMode.VERIFY: self.draft_tokens + 1} if self.draft_tokens else {}
        return {ForwardMode.DECODE: 1} | verify


class Runner:
    """Runs steps eagerly, or decode and verify steps captured when `graph` is set.

    `slots` and `req_to_slot` (int64 [requests], virtual slots, row 0 is padding) are the state slots of a model with
    recurrent layers, whose backend is built here, after the stamp.
    """

    def __init__(
        self,
        model: CausalModel,
        allocator: PageAllocator,
        translator: KVIndexTranslator,
        backend: AttentionBackend,
        config: RunnerConfig,
        *,
        slots: SlotAllocator | None = None,
        req_to_slot: torch.Tensor | None = None,
    ) -> None:
        self.model, self.allocator, self.translator, self.backend = model, allocator, translator, backend
        self.config, self.slots, self.req_to_slot = config, slots, req_to_slot
        stamp_runner(self, resolve(config.linear_flags))
        self.linear = None
        if slots is not None and config.linear_family is not None:
            cls = linear_backend_class(config.linear_family)
            self.linear = cls(runner=self, pool=slots.pool, launcher=backend.launcher, topk=config.draft_tokens and 1)
            if config.draft_tokens:
                self.linear.reserve_verify(config.max_batch, config.draft_tokens + 1)
        self.expanded = None
        if config.expand_tokens:
            self.expanded = MlaPrefill(
                pool=translator.pool,
                translator=translator,
                launcher=backend.launcher,
                chunk_tokens=config.expand_tokens,
            )
        self._verified: LinearMetadata | None = None
        self.graphs = self._capture() if config.graph else None

    @torch.inference_mode()
    def forward(self, step: Step, rows: torch.Tensor) -> Forwarded:
        """Results of the step; its logits [n, vocab] are those of token rows `rows` [n]."""
        owns = self.translator.owns_ids
        if owns:
            self.allocator.begin_forward(step.written_pages, [request.slot for request in step.requests])
        if self.graphs is not None and self.graphs.has(step.mode):
            done = self.graphs.run(self._batch(step, self.graphs.lanes_for(len(step.requests))))
            logits = done.logits[rows]
        else:
            batch = self._batch(step, len(step.requests))
            done = self._run(batch.input_ids, batch.positions, self._plan(batch), rows)
            logits = done.logits
        if owns:
            self.allocator.end_forward()
        if not bool(logits.isfinite().all()):
            bad = [i for i, row in enumerate(logits.isfinite().all(-1).tolist()) if not row]
            raise NonFiniteLogitsError(
                f"logits of {len(bad)} of {len(logits)} rows are not finite, the first is row {bad[0]}"
            )
        features = None if done.features is None else done.features[: len(step.input_ids)]  # without padded lanes
        return Forwarded(hidden=done.hidden, logits=logits, features=features)

    @torch.inference_mode()
    def inject(self, step: Step, features: torch.Tensor) -> None:
        """Store a block draft's rows of the step's new tokens, from the target's features [tokens, layers * hidden]."""
        owns = self.translator.owns_ids
        if owns:
            self.allocator.begin_forward(step.written_pages, [request.slot for request in step.requests])
        batch = self._batch(step, len(step.requests))
        self.model.inject(features, batch.positions, self._mixers(self.backend.plan(batch), None))
        if owns:
            self.allocator.end_forward()

    @torch.inference_mode()
    def commit(self, lengths: Sequence[int]) -> None:
        """After a verify: advance the recurrent states by the first `lengths` new tokens of every request."""
        if self.linear is None:
            return
        if self._verified is None:
            raise InvariantError("commit before a verify")
        padded = [*lengths, *[0] * (self._verified.slots.tensor.numel() - len(lengths))]
        self.linear.commit(self._verified, upload(padded, self.translator.req_to_token.device))
        self._verified = None

    # -- inside ----------------------------------------------------------------------------------

    def _capture(self) -> StepGraphs:
        config, modes = self.config, self.config.captured
        self.backend.capture(config.max_batch, max(modes.values()))
        if self.linear is not None:
            self.linear.capture(config.max_batch)
        steps = [
            CapturedStep(mode=mode, query_len=length, padding=self._padding, refill=self._refill)
            for mode, length in modes.items()
        ]
        return StepGraphs(steps, config.max_batch, self.translator.req_to_token.device)

    def _refill(self, batch: ForwardBatch) -> Callable[[torch.Tensor, torch.Tensor], Forwarded]:
        """Refill every stable buffer; what comes back runs the model over them."""
        metadata, linear = self.backend.replay(batch), None
        if self.linear is not None:
            verify = batch.mode is ForwardMode.VERIFY
            linear = self.linear.replay(batch, self._kernel_slots(batch), verify=verify)
            self._verified = linear if verify else None
        mixers = self._mixers(metadata, linear)
        return lambda input_ids, positions: self._run(input_ids, positions, mixers, None)

    def _plan(self, batch: ForwardBatch) -> PooledMixers:
        linear = None
        if self.linear is not None:
            verify = batch.mode is ForwardMode.VERIFY
            linear = self.linear.plan(batch, self._kernel_slots(batch), verify=verify)
            self._verified = linear if verify else None
        expands = batch if batch.mode is ForwardMode.EXTEND else None
        return self._mixers(self.backend.plan(batch), linear, expands)

    def _mixers(
        self, metadata: Metadata, linear: LinearMetadata | None, expands: ForwardBatch | None = None
    ) -> PooledMixers:
        return PooledMixers(
            backend=self.backend,
            metadata=metadata,
            linear=self.linear,
            linear_metadata=linear,
            expanded=self.expanded,
            batch=expands,
            expands_latent=expands is not None and self.expanded is not None,
            feature_layers=self.config.feature_layers,
        )

    def _run(
        self, input_ids: torch.Tensor, positions: torch.Tensor, mixers: PooledMixers, rows: torch.Tensor | None
    ) -> Forwarded:
        hidden = self.model(input_ids, positions, mixers)
        features = None
        if self.config.feature_layers:
            features = torch.cat([mixers.features[layer] for layer in self.config.feature_layers], -1)
        logits = self.model.logits(hidden if rows is None else hidden[rows])
        return Forwarded(hidden=hidden, logits=logits, features=features)

    def _kernel_slots(self, batch: ForwardBatch) -> KernelSlots:
        assert self.slots is not None
        assert self.req_to_slot is not None
        return self.slots.kernel_slots(VirtualSlots(self.req_to_slot[batch.req_rows]))

    def _batch(self, step: Step, lanes: int) -> ForwardBatch:
        """The step as a forward batch, padded to `lanes` with requests that read and write the sink only."""
        spare, query_len = lanes - len(step.requests), step.query_lens[0]
        written = step.virtual_write_ids.tensor
        if spare:
            written = torch.cat([written, self._sink_slots(spare, query_len)])
        return ForwardBatch.create(
            mode=step.mode,
            input_ids=step.input_ids + [0] * (spare * query_len),
            req_rows=[request.row for request in step.requests] + [0] * spare,
            seq_lens=step.seq_lens + [query_len] * spare,
            query_lens=step.query_lens + [query_len] * spare,
            virtual_write_ids=VirtualIds(written),
            translator=self.translator,
        )

    def _padding(self, mode: ForwardMode, lanes: int) -> ForwardBatch:
        query_len = self.config.captured[mode]
        return ForwardBatch.create(
            mode=mode,
            input_ids=[0] * (lanes * query_len),
            req_rows=[0] * lanes,
            seq_lens=[query_len] * lanes,
            query_lens=[query_len] * lanes,
            virtual_write_ids=VirtualIds(self._sink_slots(lanes, query_len)),
            translator=self.translator,
        )

    def _sink_slots(self, lanes: int, query_len: int) -> torch.Tensor:
        """Where padding requests write: in the sink page, at the slots that they read, the same of every lane."""
        places = torch.arange(lanes * query_len, device=self.translator.req_to_token.device)
        return places % query_len % self.translator.page_size
