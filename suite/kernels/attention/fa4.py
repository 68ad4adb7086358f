"""FlashAttention 4 over page tables, from the package `flash-attn-4`.

Index layout, capture and window are fa3's. What could be checked is the source of release 4.0.0b36,
nothing has run: `flash_attn_varlen_func` takes int32 page tables with `seqused_k` on sm_90 and sm_100,
not on sm_80 or sm_120; splits over the keys exist on sm_100 only; there a page of 128 tokens is one
tile, so we ask for that size as serving engines do, while sm_90 gathers rows of any page, of head_dims
in sixteens.
"""

from typing import Any

import torch

from suite.errors import InvariantError
from suite.kernels.attention.base import AttentionBackend, Metadata, PageTableMetadata
from suite.kernels.attention.facts import Capability
from suite.kernels.attention.page_table import PageTableCapture, plan_page_table
from suite.kernels.attention.reference import execute
from suite.kernels.attention.support import gpu_capability, native_refusal, table_refusal
from suite.kernels.batch import ForwardBatch
from suite.kernels.geometry import AttentionLayer, RunnerGeometry
from suite.records import Launcher, PoolMode

DTYPES = (torch.float16, torch.bfloat16)
SM90: Capability = (9, 0)
SPLITS_BY_HEURISTIC = 0


class Fa4Backend(AttentionBackend):
    """int32 page tables; native through `flash_attn.cute`, or the same tables through the oracle."""

    name = "fa4"
    captured: PageTableCapture | None = None

    @classmethod
    def launchers(cls, device: str) -> dict[Launcher, str | None]:
        return {"native": native_refusal("fa4", device), "reference": None}

    @classmethod
    def refusal(
        cls, geometry: RunnerGeometry, pool: PoolMode, device: str, launcher: Launcher, sinks: bool
    ) -> str | None:
        if reason := table_refusal("fa4", geometry, pool, device, launcher, sinks):
            return reason
        capability = gpu_capability() if launcher == "native" and device == "cuda" else None
        for kv in geometry.pools:
            if launcher == "native" and kv.dtype not in DTYPES:
                return f"fa4: needs {' or '.join(map(str, DTYPES))}, got {kv.dtype}"
            if need := _head_dims_needed(kv.head_dim, kv.value_dim, capability):
                return f"fa4: needs a head_dim that is {need}, got {kv.head_dim} and {kv.value_dim}"
        return cls.launcher_refusal(device, launcher)

    def plan(self, batch: ForwardBatch) -> PageTableMetadata:
        return plan_page_table(batch, self.translator)

    def capture(self, max_batch: int, draft_tokens: int = 1) -> None:
        self.captured = PageTableCapture(self.translator, max_batch, draft_tokens)

    def replay(self, batch: ForwardBatch) -> PageTableMetadata:
        if self.captured is None:
            raise InvariantError("fa4: replay before capture")
        return self.captured.refill(batch)

    def forward(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, metadata: Metadata
    ) -> torch.Tensor:
        self.pool.write(layer.index, metadata.write_ids_of(layer.kind), k, v)
        if self.launcher == "reference":
            return execute(metadata, layer, q, self.pool)
        if not isinstance(metadata, PageTableMetadata):
            raise TypeError(f"fa4: needs PageTableMetadata, got {type(metadata).__name__}")
        return self._attend(layer, q, metadata)

    def _attend(self, layer: AttentionLayer, q: torch.Tensor, metadata: PageTableMetadata) -> torch.Tensor:
        from flash_attn.cute import flash_attn_varlen_func  # a GPU library, loaded by whoever launches it

        # no length of the keys but the table's width: a captured graph must cover every later batch
        out: Any = flash_attn_varlen_func(
            q=q,
            k=self.pool.paged(self.pool.k_view(layer.index)),
            v=self.pool.paged(self.pool.v_view(layer.index)),
            cu_seqlens_q=metadata.cu_query_lens,
            max_seqlen_q=metadata.max_query_len,
            seqused_k=metadata.seq_lens,
            page_table=metadata.table_of(layer.kind),
            softmax_scale=layer.scale,
            causal=True,
            window_size=(None, None) if layer.window is None else (layer.window - 1, 0),
            learnable_sink=None if layer.sinks is None else layer.sinks.to(torch.bfloat16),  # every release takes it
            num_splits=1 if gpu_capability() == SM90 else SPLITS_BY_HEURISTIC,
        )
        attended: torch.Tensor = out[0]  # the second is the log-sum-exp
        return attended


def _head_dims_needed(head_dim: int, value_dim: int, capability: Capability | None) -> str | None:
    """What the kernels for a GPU of `capability` (None: of either kind) ask of a head_dim; None when they take it."""
    widest, step = max(head_dim, value_dim), 16 if capability == SM90 else 8
    if head_dim % step or value_dim % step or widest > 256:
        return f"a multiple of {step}, at most 256"
    if capability in (None, SM90) or widest <= 128 or head_dim == value_dim == 256:
        return None
    return "at most 128, or 256 for K and V"
