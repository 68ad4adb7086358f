"""The contract of the linear-attention backends: five verbs and a commit, on one runner's recurrent state.

`refusal` before anything is allocated, `plan` for an eager forward, `capture` and `replay` for a captured one,
`forward` to run a layer. Decode and prefill advance the committed state of a request's slot. Verify only reads
it and keeps the state after every draft token in scratch; `commit` then makes the one after the accepted prefix
the committed one, so a rejected suffix leaves nothing behind.

Prefill gathers the batch's strided slots into dense copies and scatters them back. A request's first prefill
starts from zeros whatever its slot holds.
"""

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from suite.errors import InputError, InvariantError, RefusedError
from suite.kernels.linear.metadata import (
    BatchShape,
    CapturedLinear,
    LinearMetadata,
    LinearMode,
    Tracking,
    mode_of,
    tracked_rows,
)
from suite.kernels.linear.stamp import LinearAttnBackends, stamp_of
from suite.kernels.ops.causal_conv import causal_conv_torch, causal_conv_triton
from suite.kernels.ops.delta_chunk import CHUNK, ChunkPlan, ChunkResult, delta_chunk_torch, delta_chunk_triton
from suite.kernels.ops.delta_gates import delta_gates_torch, delta_gates_triton
from suite.kernels.ops.delta_step import StepInputs, delta_step_torch, delta_step_triton
from suite.kernels.ops.interpreter import INTERPRETED, interpreter_reason
from suite.kernels.ops.state_rows import copy_rows, gather_rows, scatter_rows
from suite.kernels.pools.state import (
    SKIP,
    KernelSlots,
    StateGeometry,
    StatePool,
    StateViews,
    VerifyScratch,
    require_kernel_slots,
)
from suite.kernels.upload import upload
from suite.records import Launcher

MAX_HEAD_DIM = 128  # a chunk of keys and values and the state must fit the shared memory of one SM


@dataclass(frozen=True, kw_only=True)
class LinearOps:
    """The operations of one launcher."""

    conv: Callable[..., torch.Tensor]
    gates: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    step: Callable[..., torch.Tensor]
    chunk: Callable[[StepInputs, torch.Tensor, ChunkPlan], ChunkResult]


TRITON_OPS = LinearOps(
    conv=causal_conv_triton, gates=delta_gates_triton, step=delta_step_triton, chunk=delta_chunk_triton
)
TORCH_OPS = LinearOps(conv=causal_conv_torch, gates=delta_gates_torch, step=delta_step_torch, chunk=delta_chunk_torch)


class LinearBackend(abc.ABC):
    """One family's linear attention on one runner. An unstamped runner raises AttributeError."""

    name: ClassVar[str]
    # phase -> kernel names that this backend has
    kernels: ClassVar[dict[str, tuple[str, ...]]] = {
        "decode": ("triton",),
        "prefill": ("triton",),
        "verify": ("triton",),
    }

    def __init__(
        self, *, runner: Any, pool: StatePool, launcher: Launcher, topk: int = 0, deterministic: bool = False
    ) -> None:
        self.stamp = stamp_of(runner)
        reason = self.refusal(
            self.stamp, pool.geometry, pool.device.type, launcher, topk=topk, deterministic=deterministic
        )
        if reason:
            raise RefusedError(reason)
        self.pool, self.launcher = pool, launcher
        self.ops = TORCH_OPS if launcher == "reference" else TRITON_OPS
        self.scratch: VerifyScratch | None = None
        self.captured: dict[LinearMode, CapturedLinear] = {}

    @classmethod
    def launchers(cls, device: str) -> dict[Launcher, str | None]:
        """What could execute this backend on `device`: launcher -> None, or why not here."""
        on_gpu = device == "cuda" and torch.cuda.is_available()
        native = None if on_gpu and not INTERPRETED else f"{cls.name}: needs compiled kernels on CUDA, got {device}"
        if on_gpu and INTERPRETED:
            native = f"{cls.name}: needs TRITON_INTERPRET unset, got it set"
        interpreter = f"{cls.name}: needs the CPU to interpret, got {device}"
        return {
            "native": native,
            "interpreter": interpreter_reason(cls.name) if device == "cpu" else interpreter,
            "reference": None,
        }

    @classmethod
    @abc.abstractmethod
    def refusal(
        cls,
        stamp: LinearAttnBackends,
        geometry: StateGeometry,
        device: str,
        launcher: Launcher,
        *,
        topk: int = 0,
        deterministic: bool = False,
    ) -> str | None:
        """Why this backend cannot serve, with need and got; None when it can. topk: draft branches, 0 without a draft.

        Called before anything is allocated.
        """

    @classmethod
    def common_refusal(
        cls, stamp: LinearAttnBackends, geometry: StateGeometry, device: str, launcher: Launcher
    ) -> str | None:
        """What every family refuses: unknown launchers, kernels it does not have, shapes that do not fit."""
        known = cls.launchers(device)
        if launcher not in known:
            return f"{cls.name}: needs launcher {' or '.join(known)}, got {launcher}"
        for phase, kernels in cls.kernels.items():
            if (got := getattr(stamp, phase)) not in kernels:
                return f"{cls.name}: needs {phase} kernel {' or '.join(kernels)}, got {got}"
        if geometry.conv_width >= CHUNK:
            return f"{cls.name}: needs a convolution window < {CHUNK}, got {geometry.conv_width}"
        widest = max(geometry.k_dim, geometry.v_dim)
        if launcher != "reference" and widest > MAX_HEAD_DIM:
            return f"{cls.name}: needs k_dim and v_dim <= {MAX_HEAD_DIM}, got {widest}"
        if launcher == "interpreter" and geometry.temporal_dtype != torch.float32:
            return (
                f"{cls.name}: needs fp32 states under the interpreter, which truncates, got {geometry.temporal_dtype}"
            )
        return known[launcher]

    def plan(
        self,
        batch: BatchShape,
        slots: KernelSlots,
        *,
        verify: bool = False,
        parents: torch.Tensor | None = None,
        tracking: Tracking | None = None,
    ) -> LinearMetadata:
        """Metadata of one eager forward. `parents` makes a verify a tree, `tracking` makes a prefill take snapshots."""
        kernel_slots, size = require_kernel_slots(slots, f"{self.name}.plan"), len(batch.query_lens_host)
        if kernel_slots.shape != (size,):
            raise InputError("slots", tuple(kernel_slots.shape), f"({size},), one per request")
        mode = mode_of(batch, verify)
        if (parents is not None and mode is not LinearMode.VERIFY) or (tracking and mode is not LinearMode.EXTEND):
            raise InputError("mode", str(mode), "verify for parents, extend for tracking")
        longest = max(batch.query_lens_host)
        rows = sources = chunks = None
        if mode is LinearMode.VERIFY:
            rows = self._scratch_of(longest).rows(kernel_slots)
        elif mode is LinearMode.EXTEND:
            position = torch.arange(size, device=kernel_slots.device)
            rows = torch.where(kernel_slots < 0, SKIP, position)
            lens = zip(batch.seq_lens_host, batch.query_lens_host, strict=True)
            begun = upload([seq_len > query_len for seq_len, query_len in lens], kernel_slots.device)
            sources = torch.where(begun > 0, kernel_slots, SKIP)
            chunks = ChunkPlan.create(batch.query_lens_host, kernel_slots.device)
        return LinearMetadata(
            mode=mode,
            cu_query_lens=batch.cu_query_lens,
            max_query_len=longest,
            slots=slots,
            rows=rows,
            sources=sources,
            chunks=chunks,
            parents=parents,
            tracking=None
            if tracking is None or chunks is None
            else tracked_rows(tracking, chunks, self.pool.geometry.conv_width),
        )

    def reserve_verify(self, max_batch: int, draft_tokens: int) -> None:
        """Allocate the scratch that verify needs: states of `draft_tokens` tokens for up to `max_batch` requests."""
        self.scratch = VerifyScratch(self.pool, max_batch, draft_tokens)

    def capture(self, max_batch: int) -> None:
        """Allocate the stable buffers of captured decode batches, and of captured verifies where scratch is reserved.

        A verify batch is captured with as many draft tokens per request as the scratch holds.
        """
        if max_batch < 1:
            raise InputError("max_batch", max_batch, "a positive number of requests")
        self.captured = {LinearMode.DECODE: CapturedLinear(self.pool.device, max_batch, 1)}
        if self.scratch is not None:
            self.captured[LinearMode.VERIFY] = CapturedLinear(self.pool.device, max_batch, self.scratch.draft_tokens)

    def replay(self, batch: BatchShape, slots: KernelSlots, *, verify: bool = False) -> LinearMetadata:
        """Refill the stable buffers for a (padded) decode or chain-verify batch, outside the graph.

        The returned metadata has the same addresses for every batch of the same size and mode.
        """
        mode = mode_of(batch, verify)
        if mode not in self.captured:
            raise InvariantError(f"{self.name}: replay of {mode} before its capture; captured {list(self.captured)}")
        return self.captured[mode].refill(mode, batch, require_kernel_slots(slots, f"{self.name}.replay"), self.scratch)

    @abc.abstractmethod
    def forward(self, layer: Any, inputs: Any, metadata: LinearMetadata) -> torch.Tensor:
        """Run one layer; returns [tokens, v_heads, v_dim] in the inputs' dtype."""

    def commit(self, metadata: LinearMetadata, commit_lens: torch.Tensor) -> None:
        """Advance every request of a chain verify by its first `commit_lens` [batch] draft tokens, over all layers.

        0 leaves a request where it was.
        """
        if metadata.parents is not None:
            raise InputError("commit_lens", "a draft tree", "commit_nodes for a tree: a count does not name a branch")
        self.commit_nodes(metadata, commit_lens - 1)

    def commit_nodes(self, metadata: LinearMetadata, nodes: torch.Tensor) -> None:
        """Advance every request to the state after its draft token `nodes` [batch]; negative leaves it where it was."""
        if metadata.mode is not LinearMode.VERIFY or metadata.rows is None or self.scratch is None:
            raise InvariantError(f"{self.name}: commit after {metadata.mode}, needs a verify")
        self.scratch.commit(self.pool, metadata.rows, metadata.slots, nodes)

    # -- inside ----------------------------------------------------------------------------------

    def recur(self, layer: int, inputs: StepInputs, views: StateViews, metadata: LinearMetadata) -> torch.Tensor:
        """The recurrence of one layer in the metadata's mode, states read and written where the mode says."""
        slots, temporal = metadata.slots.tensor, views.temporal
        if metadata.mode is LinearMode.DECODE:
            return self.ops.step(inputs, temporal, slots, metadata.cu_query_lens)
        if metadata.mode is LinearMode.VERIFY:
            return self.ops.step(
                inputs,
                temporal,
                slots,
                metadata.cu_query_lens,
                scratch=self._scratch_of(metadata.max_query_len).state_views(layer).temporal,
                scratch_rows=metadata.rows,
                parents=metadata.parents,
            )
        assert metadata.sources is not None
        assert metadata.chunks is not None
        initial = gather_rows(temporal, metadata.sources).float()
        result = self.prefill(inputs, initial, metadata.chunks, metadata.cu_query_lens)
        final = result.final.to(temporal.dtype)
        scatter_rows(temporal, slots, final)
        if (tracked := metadata.tracking) is not None:
            into, boundaries = temporal.view(temporal.shape[0], -1)[None], result.boundaries.to(temporal.dtype)
            copy_rows(into, tracked.slots, boundaries.flatten(1)[None], tracked.chunks)
            copy_rows(into, tracked.slots, final.flatten(1)[None], tracked.requests)
        return result.out

    def prefill(
        self, inputs: StepInputs, initial: torch.Tensor, chunks: ChunkPlan, cu_query_lens: torch.Tensor
    ) -> ChunkResult:
        """Chunked prefill from dense fp32 states; the place where a family plugs in a vendor kernel."""
        return self.ops.chunk(inputs, initial, chunks)

    def _scratch_of(self, tokens: int) -> VerifyScratch:
        if self.scratch is None:
            raise InvariantError(f"{self.name}: verify before reserve_verify")
        if tokens > self.scratch.draft_tokens:
            raise InputError("query_lens", tokens, f"at most {self.scratch.draft_tokens}, the reserved draft tokens")
        return self.scratch
