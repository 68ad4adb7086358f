"""TensorRT-LLM's MLA decode kernels as FlashInfer ships them, trtllm-gen on sm_10x and XQA on sm_12x.

A block table is as wide as whole tiles of the kernel and its helpers need: a multiple of
lcm(128 / page size, 4096 / page size) blocks. Every fill writes a request's own blocks and nothing more,
so past them stands our sentinel, -1, in an eager table and in a captured one after every refill.

trtllm-gen takes as many query tokens for every request, XQA one; a ragged extend, and any extend or verify on
XQA, becomes one lane per new token.

With an fp8 pool a fused writer casts and stores new rows in one go, past the pool's door, at the ids that
`fused_write_ids` names: the captured buffer in a captured decode, the plain write ids on a static pool,
and None in an eager forward of a unified pool, where rows are cast first and go through the door.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from suite.errors import InvariantError
from suite.kernels.attention.base import AttentionBackend, Metadata, PageTableMetadata
from suite.kernels.attention.latent import MAX_VERIFY_TOKENS, latent_pages, row_refusal
from suite.kernels.attention.page_table import PageTableCapture, plan_page_table
from suite.kernels.attention.reference import execute
from suite.kernels.attention.support import gpu_capability, native_refusal, table_refusal
from suite.kernels.batch import ForwardBatch
from suite.kernels.geometry import AttentionLayer, RunnerGeometry, pages_for
from suite.kernels.ids import KVKind
from suite.records import Launcher, PoolMode

FP8 = torch.float8_e4m3fn
DTYPES = (torch.bfloat16, FP8)
TAIL = -1
TILE_TOKENS, HELPER_TOKENS = 128, 4096  # what a tile of the kernel, and of what prepares its tables, covers
WORKSPACE_BYTES = 128 << 20
AUTO = "auto"  # the library's name for: trtllm-gen on sm_10x, XQA elsewhere
QK_NOPE_DIM = 128  # of the heads before absorption: the kernel's name for this family of models


@dataclass(frozen=True, kw_only=True, eq=False)
class TrtllmMlaMetadata(PageTableMetadata):
    """A block table with a -1 tail. fused_write_ids: [tokens] int64 kernel ids for a fused fp8 writer, or None."""

    fused_write_ids: torch.Tensor | None


def table_width(max_seq_len: int, page_size: int) -> int:
    """Columns of a block table for requests of up to `max_seq_len` tokens."""
    step = math.lcm(max(1, TILE_TOKENS // page_size), max(1, HELPER_TOKENS // page_size))
    return -(-pages_for(max_seq_len, page_size) // step) * step


class TrtllmMlaBackend(AttentionBackend):
    """int32 block tables; native through `flashinfer.mla`, or the same tables through the oracle."""

    name = "trtllm_mla"
    captured: PageTableCapture | None = None
    _table: torch.Tensor | None = None
    _zeroed_workspace: torch.Tensor | None = None

    @classmethod
    def launchers(cls, device: str) -> dict[Launcher, str | None]:
        return {"native": native_refusal(cls.name, device), "reference": None}

    @classmethod
    def refusal(
        cls, geometry: RunnerGeometry, pool: PoolMode, device: str, launcher: Launcher, sinks: bool
    ) -> str | None:
        if reason := table_refusal(cls.name, geometry, pool, device, launcher, sinks):
            return reason
        if launcher == "native" and (reason := row_refusal(cls.name, geometry, DTYPES)):
            return reason
        return cls.launcher_refusal(device, launcher)

    def plan(self, batch: ForwardBatch) -> TrtllmMlaMetadata:
        rows = self._rows_of(batch)
        columns = table_width(batch.max_seq_len, self.translator.page_size)
        table = torch.full((rows.size, columns), TAIL, dtype=torch.int32, device=self.pool.device)
        self.translator.fill_read_table(rows, KVKind.FULL, table)
        metadata = replace(plan_page_table(rows, self.translator), page_table=table, mode=batch.mode)
        fused = metadata.write_ids.tensor if self._has_fp8 and self.pool.mode == "static" else None
        return _with_fused(metadata, fused)

    def capture(self, max_batch: int, draft_tokens: int = 1) -> None:
        takes_lanes = self.launcher == "native" and draft_tokens > _most_queries()
        rows, tokens = (max_batch * draft_tokens, 1) if takes_lanes else (max_batch, draft_tokens)
        self.captured = PageTableCapture(self.translator, rows, tokens)
        columns = table_width(self.translator.req_to_token.shape[1], self.translator.page_size)
        self._table = torch.full((rows, columns), TAIL, dtype=torch.int32, device=self.pool.device)
        if self.launcher == "native":
            self._workspace()  # outside of every graph

    def replay(self, batch: ForwardBatch) -> TrtllmMlaMetadata:
        if self.captured is None or self._table is None:
            raise InvariantError(f"{self.name}: replay before capture")
        rows = self._rows_of(batch)
        metadata = self.captured.refill(rows)
        table = self._table[: rows.size].fill_(TAIL)  # a longer request's blocks would still stand past a shorter one
        self.translator.fill_read_table(rows, KVKind.FULL, table)
        metadata = replace(metadata, page_table=table, mode=batch.mode)
        return _with_fused(metadata, metadata.write_ids.tensor if self._has_fp8 else None)

    def forward(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, metadata: Metadata
    ) -> torch.Tensor:
        if not isinstance(metadata, TrtllmMlaMetadata):
            raise TypeError(f"{self.name}: needs TrtllmMlaMetadata, got {type(metadata).__name__}")
        self._write(layer, k, v, metadata)
        if self.launcher == "reference":
            return execute(metadata, layer, q, self.pool)
        rows = metadata.seq_lens.numel()
        query = q.to(self.pool.geometry.full.dtype).contiguous()
        query = query.view(rows, metadata.max_query_len, layer.q_heads, layer.head_dim)
        out = self._attend(layer, query, latent_pages(self.pool, layer.index), metadata)
        return out.view(q.shape[0], layer.q_heads, layer.out_dim).to(q.dtype)

    def _attend(
        self, layer: AttentionLayer, query: torch.Tensor, pages: torch.Tensor, metadata: TrtllmMlaMetadata
    ) -> torch.Tensor:
        """query [rows, queries, heads, width] over pages [pages, page size, width]: [rows, queries, heads, latent]."""
        return self._flashinfer(layer, query, pages, metadata, kernels=AUTO)

    def _flashinfer(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        pages: torch.Tensor,
        metadata: TrtllmMlaMetadata,
        *,
        kernels: str,
    ) -> torch.Tensor:
        from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla  # a GPU library

        out: torch.Tensor = trtllm_batch_decode_with_kv_cache_mla(
            query=query,
            kv_cache=pages.unsqueeze(1),
            workspace_buffer=self._workspace(),
            qk_nope_head_dim=QK_NOPE_DIM,
            kv_lora_rank=layer.out_dim,
            qk_rope_head_dim=layer.head_dim - layer.out_dim,
            block_tables=metadata.page_table,
            seq_lens=metadata.seq_lens,
            max_seq_len=metadata.page_table.shape[1] * metadata.page_size,
            bmm1_scale=layer.scale * self.pool.scales(layer.index)[0],
            bmm2_scale=self.pool.scales(layer.index)[1],
            backend=kernels,
        )
        return out

    def _rows_of(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch as the kernels take it: as many new tokens per table row, few enough; else lanes."""
        uniform = len(set(batch.query_lens_host)) == 1 and batch.query_lens_host[0] <= _most_queries()
        return batch if uniform or self.launcher != "native" else batch.as_lanes()

    @property
    def _has_fp8(self) -> bool:
        return self.pool.geometry.full.dtype is FP8

    def _write(
        self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor | None, metadata: TrtllmMlaMetadata
    ) -> None:
        """Store new rows k [tokens, 1, width]; an fp8 pool's are divided by its scale and cast."""
        if metadata.fused_write_ids is None:
            self.pool.write(layer.index, metadata.write_ids, k, v)
        else:
            scaled = k[:, 0].float() / self.pool.scales(layer.index)[0]
            cast_and_store(self.pool.latent_view(layer.index), metadata.fused_write_ids, scaled)

    def _workspace(self) -> torch.Tensor:
        """Semaphores and partial results, allocated with the first use and never rebound: graphs hold its address."""
        if self._zeroed_workspace is None:  # the kernels leave their semaphores at zero, as they need them
            self._zeroed_workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.pool.device)
        return self._zeroed_workspace


def cast_and_store(view: torch.Tensor, kernel_ids: torch.Tensor, rows: torch.Tensor) -> None:
    """Store rows [tokens, width], cast to fp8, at `kernel_ids` [tokens] of an fp8 view [all rows, width]."""
    view.view(torch.uint8).index_copy_(0, kernel_ids, rows.to(view.dtype).view(torch.uint8))


def _most_queries() -> int:
    """New tokens per table row that the kernels for this GPU take."""
    capability = gpu_capability()
    return MAX_VERIFY_TOKENS if capability is not None and capability[0] == 10 else 1


def _with_fused(metadata: PageTableMetadata, fused_write_ids: torch.Tensor | None) -> TrtllmMlaMetadata:
    known: dict[str, Any] = {field.name: getattr(metadata, field.name) for field in fields(PageTableMetadata)}
    return TrtllmMlaMetadata(**known, fused_write_ids=fused_write_ids)
