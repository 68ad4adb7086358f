"""FlashMLA over block tables of 64-token pages, as `sgl_kernel` ships it.

The kernel takes as many query tokens for every request. A decode has one, a verify as many for all; a
ragged extend becomes one *lane* per new token, exact, and slow for a long prefill, which belongs in the
expanded form (`mla_prefill.py`). Its scheduler runs on the GPU from the lengths and needs the query
heads, which no metadata knows: the first forward of a shape schedules, and every later replay refills
that schedule in place before its graph runs.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch

from suite.errors import InvariantError
from suite.kernels.attention.base import AttentionBackend, Metadata, PageTableMetadata
from suite.kernels.attention.latent import MAX_VERIFY_TOKENS, latent_pages, row_refusal
from suite.kernels.attention.page_table import PageTableCapture, plan_page_table
from suite.kernels.attention.reference import execute
from suite.kernels.attention.support import native_refusal, table_refusal
from suite.kernels.batch import ForwardBatch
from suite.kernels.geometry import AttentionLayer, RunnerGeometry
from suite.records import Launcher, PoolMode

MAX_ROWS = 1024  # table rows per launch: the scheduler holds all of them in one block's shared memory
Schedule = tuple[slice, torch.Tensor, torch.Tensor]  # some table rows, their tiles, the splits of each


@dataclass(frozen=True, kw_only=True, eq=False)
class FlashMlaMetadata(PageTableMetadata):
    """A block table whose tail may be stale. In native metadata every row of it has `max_query_len` queries."""

    is_captured: bool

    @classmethod
    def of(cls, metadata: PageTableMetadata, *, is_captured: bool) -> "FlashMlaMetadata":
        known = {field.name: getattr(metadata, field.name) for field in fields(PageTableMetadata)}
        return cls(**known, is_captured=is_captured)


class FlashMlaBackend(AttentionBackend):
    """int32 block tables; native through `sgl_kernel.flash_mla`, or the same tables through the oracle."""

    name = "flashmla"
    captured: PageTableCapture | None = None

    def __init__(self, **runner: Any) -> None:
        super().__init__(**runner)
        # (table rows, query heads, queries of a row) of captured metadata
        self._schedules: dict[tuple[int, int, int], list[Schedule]] = {}
        self._eager: tuple[FlashMlaMetadata, int, list[Schedule]] | None = None

    @classmethod
    def launchers(cls, device: str) -> dict[Launcher, str | None]:
        return {"native": native_refusal("flashmla", device), "reference": None}

    @classmethod
    def refusal(
        cls, geometry: RunnerGeometry, pool: PoolMode, device: str, launcher: Launcher, sinks: bool
    ) -> str | None:
        if reason := table_refusal("flashmla", geometry, pool, device, launcher, sinks):
            return reason
        if launcher == "native" and (reason := row_refusal("flashmla", geometry)):
            return reason
        return cls.launcher_refusal(device, launcher)

    def plan(self, batch: ForwardBatch) -> FlashMlaMetadata:
        return FlashMlaMetadata.of(plan_page_table(self._rows_of(batch), self.translator), is_captured=False)

    def capture(self, max_batch: int, draft_tokens: int = 1) -> None:
        if self.launcher == "native" and draft_tokens > MAX_VERIFY_TOKENS:
            self.captured = PageTableCapture(self.translator, max_batch * draft_tokens)  # lanes
        else:
            self.captured = PageTableCapture(self.translator, max_batch, draft_tokens)
        self._schedules = {}

    def replay(self, batch: ForwardBatch) -> FlashMlaMetadata:
        if self.captured is None:
            raise InvariantError("flashmla: replay before capture")
        metadata = FlashMlaMetadata.of(self.captured.refill(self._rows_of(batch)), is_captured=True)
        shape = metadata.seq_lens.numel(), metadata.max_query_len
        for (size, q_heads, queries), stable in self._schedules.items():
            if (size, queries) == shape:  # a graph reads these addresses, so never rebind them
                for (_, *kept), (_, *new) in zip(stable, _schedule(metadata, q_heads), strict=True):
                    kept[0].copy_(new[0])
                    kept[1].copy_(new[1])
        return metadata

    def forward(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, metadata: Metadata
    ) -> torch.Tensor:
        self.pool.write(layer.index, metadata.write_ids_of(layer.kind), k, v)
        if self.launcher == "reference":
            return execute(metadata, layer, q, self.pool)
        if not isinstance(metadata, FlashMlaMetadata):
            raise TypeError(f"flashmla: needs FlashMlaMetadata, got {type(metadata).__name__}")
        return self._attend(layer, q, metadata)

    def _rows_of(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch as the kernel takes it: as many new tokens per table row, no more than a verify has; else lanes."""
        uniform = len(set(batch.query_lens_host)) == 1 and batch.query_lens_host[0] <= MAX_VERIFY_TOKENS
        return batch if uniform or self.launcher != "native" else batch.as_lanes()

    def _attend(self, layer: AttentionLayer, q: torch.Tensor, metadata: FlashMlaMetadata) -> torch.Tensor:
        from sgl_kernel.flash_mla import flash_mla_with_kvcache  # a GPU library, loaded by whoever launches it

        queries = q.contiguous().view(-1, metadata.max_query_len, layer.q_heads, layer.head_dim)
        out = q.new_empty(*queries.shape[:3], layer.out_dim)
        for rows, tiles, splits in self._schedule_of(metadata, layer.q_heads):
            out[rows], _ = flash_mla_with_kvcache(
                q=queries[rows],
                k_cache=latent_pages(self.pool, layer.index).unsqueeze(2),
                block_table=metadata.page_table[rows],
                cache_seqlens=metadata.seq_lens[rows],
                head_dim_v=layer.out_dim,
                tile_scheduler_metadata=tiles,
                num_splits=splits,
                softmax_scale=layer.scale,
                causal=True,
            )
        return out.view(q.shape[0], layer.q_heads, layer.out_dim)

    def _schedule_of(self, metadata: FlashMlaMetadata, q_heads: int) -> list[Schedule]:
        """The schedule of this forward: made once per eager metadata; kept per batch size where captured."""
        if metadata.is_captured:
            key = metadata.seq_lens.numel(), q_heads, metadata.max_query_len
            if key not in self._schedules:
                if torch.cuda.is_current_stream_capturing():
                    raise InvariantError("flashmla: needs a forward of every captured batch size before its capture")
                self._schedules[key] = _schedule(metadata, q_heads)
            return self._schedules[key]
        if self._eager is None or self._eager[0] is not metadata or self._eager[1] != q_heads:
            self._eager = metadata, q_heads, _schedule(metadata, q_heads)
        return self._eager[2]


def _schedule(metadata: FlashMlaMetadata, q_heads: int) -> list[Schedule]:
    """The scheduler's word on every launch of this forward; it runs on the GPU and reads lengths only."""
    from sgl_kernel.flash_mla import get_mla_metadata  # a GPU library, loaded by whoever launches it

    every = range(0, metadata.seq_lens.numel(), MAX_ROWS)
    some = [slice(first, first + MAX_ROWS) for first in every]
    query_rows = metadata.max_query_len * q_heads
    return [(rows, *get_mla_metadata(metadata.seq_lens[rows], query_rows, 1)) for rows in some]
