"""FlashAttention 3 over page tables, as `sgl_kernel` ships it.

Eager, the translator's table is used as it is when it already has this page size; captured, stable
tables are refilled in place and only lengths change with them. The kernel reads whole pages, whatever
lies past a request's last one may be stale. Elsewhere the oracle executes the same page tables.
"""

from typing import Any

import torch

from suite.errors import InvariantError
from suite.kernels.attention.base import AttentionBackend, Metadata, PageTableMetadata
from suite.kernels.attention.latent import row_refusal
from suite.kernels.attention.page_table import PageTableCapture, plan_page_table
from suite.kernels.attention.reference import execute
from suite.kernels.attention.support import native_refusal, table_refusal
from suite.kernels.batch import ForwardBatch
from suite.kernels.geometry import AttentionLayer, RunnerGeometry
from suite.kernels.ids import KVKind
from suite.records import Launcher, PoolMode

DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256


class Fa3Backend(AttentionBackend):
    """int32 page tables; native through `sgl_kernel`, or the same tables through the oracle."""

    name = "fa3"
    captured: PageTableCapture | None = None

    @classmethod
    def launchers(cls, device: str) -> dict[Launcher, str | None]:
        return {"native": native_refusal("fa3", device), "reference": None}

    @classmethod
    def refusal(
        cls, geometry: RunnerGeometry, pool: PoolMode, device: str, launcher: Launcher, sinks: bool
    ) -> str | None:
        if reason := table_refusal(cls.name, geometry, pool, device, launcher, sinks):
            return reason
        if geometry.full.is_latent:
            reason = row_refusal(cls.name, geometry) if launcher == "native" else None
            return reason or cls.launcher_refusal(device, launcher)
        for kv in geometry.pools:
            if kv.head_dim > MAX_HEAD_DIM or kv.head_dim % 8:
                return f"fa3: needs a head_dim that is a multiple of 8, at most {MAX_HEAD_DIM}, got {kv.head_dim}"
            if launcher == "native" and kv.dtype not in DTYPES:
                return f"fa3: needs {' or '.join(map(str, DTYPES))}, got {kv.dtype}"
        return cls.launcher_refusal(device, launcher)

    def plan(self, batch: ForwardBatch) -> PageTableMetadata:
        return plan_page_table(batch, self.translator)

    def capture(self, max_batch: int, draft_tokens: int = 1) -> None:
        self.captured = PageTableCapture(self.translator, max_batch, draft_tokens)

    def replay(self, batch: ForwardBatch) -> PageTableMetadata:
        if self.captured is None:
            raise InvariantError("fa3: replay before capture")
        return self.captured.refill(batch)

    def forward(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, metadata: Metadata
    ) -> torch.Tensor:
        self.pool.write(layer.index, metadata.write_ids_of(layer.kind), k, v)
        if self.launcher == "reference":
            return execute(metadata, layer, q, self.pool)
        if not isinstance(metadata, PageTableMetadata):
            raise TypeError(f"fa3: needs PageTableMetadata, got {type(metadata).__name__}")
        attend = self._attend_latent if layer.is_latent else self._attend
        return attend(layer, q, metadata)

    def _attend(self, layer: AttentionLayer, q: torch.Tensor, metadata: PageTableMetadata) -> torch.Tensor:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache  # a GPU library, loaded by whoever launches it

        table = metadata.page_table if layer.kind is KVKind.FULL else metadata.window_page_table
        out: Any = flash_attn_with_kvcache(
            q=q,
            k_cache=self._pages(self.pool.k_view(layer.index)),
            v_cache=self._pages(self.pool.v_view(layer.index)),
            page_table=table,
            cache_seqlens=metadata.seq_lens,
            cu_seqlens_q=metadata.cu_query_lens,
            max_seqlen_q=metadata.max_query_len,
            softmax_scale=layer.scale,
            causal=True,
            window_size=(-1, -1) if layer.window is None else (layer.window - 1, 0),
            sinks=None if layer.sinks is None else layer.sinks.to(torch.bfloat16),  # the only dtype it takes
        )
        return out

    def _attend_latent(self, layer: AttentionLayer, q: torch.Tensor, metadata: PageTableMetadata) -> torch.Tensor:
        """Absorbed MLA: the rotary keys are FA3's K, the latents its V, and `qv` is what asks the latents as keys."""
        from sgl_kernel.flash_attn import flash_attn_with_kvcache  # a GPU library, loaded by whoever launches it

        pages, latent = self._pages(self.pool.k_view(layer.index)), layer.out_dim
        out: Any = flash_attn_with_kvcache(
            q=q[..., latent:],
            qv=q[..., :latent],
            k_cache=pages[..., latent:],
            v_cache=pages[..., :latent],
            page_table=metadata.page_table,
            cache_seqlens=metadata.seq_lens,
            cu_seqlens_q=metadata.cu_query_lens,
            max_seqlen_q=metadata.max_query_len,
            softmax_scale=layer.scale,
            causal=True,
        )
        return out

    def _pages(self, view: torch.Tensor) -> torch.Tensor:
        """[rows, kv_heads, head_dim] -> [pages, page_size, kv_heads, head_dim], no copy."""
        return self.pool.paged(view)
