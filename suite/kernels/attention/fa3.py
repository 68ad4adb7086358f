"""FlashAttention 3 over page tables, as `sgl_kernel` ships it.

Eager, the translator's table is used as it is when it already has this page size; captured, stable
tables are refilled in place and only lengths change with them. The kernel reads whole pages, whatever
lies past a request's last one may be stale. Elsewhere the oracle executes the same page tables.
"""

import importlib.util
from typing import Any

import torch

from suite.errors import InputError, InvariantError
from suite.kernels.attention.base import AttentionBackend, Metadata, PageTableMetadata
from suite.kernels.attention.csr import refill_write_ids, require_capturable
from suite.kernels.attention.reference import execute
from suite.kernels.batch import ForwardBatch
from suite.kernels.geometry import AttentionLayer, RunnerGeometry
from suite.kernels.ids import KernelIds, KVKind
from suite.kernels.translator import CaptureTables
from suite.records import Launcher, PoolMode

ARCHITECTURES = ((8, 0), (9, 0))
DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256


class Fa3Backend(AttentionBackend):
    """int32 page tables; native through `sgl_kernel`, or the same tables through the oracle."""

    name = "fa3"
    captured: "_Captured | None" = None

    @classmethod
    def launchers(cls, device: str) -> dict[Launcher, str | None]:
        return {"native": _native_refusal(device), "reference": None}

    @classmethod
    def refusal(
        cls, geometry: RunnerGeometry, pool: PoolMode, device: str, launcher: Launcher, sinks: bool
    ) -> str | None:
        if geometry.page_size & (geometry.page_size - 1):
            return f"fa3: needs a page size that is a power of two, got {geometry.page_size}"
        for kv in geometry.pools:
            if kv.head_dim > MAX_HEAD_DIM or kv.head_dim % 8:
                return f"fa3: needs a head_dim that is a multiple of 8, at most {MAX_HEAD_DIM}, got {kv.head_dim}"
            if launcher == "native" and kv.dtype not in DTYPES:
                return f"fa3: needs {' or '.join(map(str, DTYPES))}, got {kv.dtype}"
        return cls.launcher_refusal(device, launcher)

    def plan(self, batch: ForwardBatch) -> PageTableMetadata:
        return PageTableMetadata(
            mode=batch.mode,
            seq_lens=batch.seq_lens,
            cu_query_lens=batch.cu_query_lens,
            max_query_len=max(batch.query_lens_host),
            max_seq_len=batch.max_seq_len,
            write_ids=batch.write_ids,
            window_write_ids=batch.window_write_ids,
            page_size=self.translator.page_size,
            page_table=self._eager_table(batch, KVKind.FULL),
            window_page_table=self._eager_table(batch, KVKind.WINDOW) if self.pool.geometry.window else None,
        )

    def capture(self, max_batch: int) -> None:
        self.captured = _Captured(self, max_batch)

    def replay(self, batch: ForwardBatch) -> PageTableMetadata:
        if self.captured is None:
            raise InvariantError("fa3: replay before capture")
        return self.captured.refill(batch)

    def forward(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Metadata
    ) -> torch.Tensor:
        self.pool.write(layer.index, metadata.write_ids_of(layer.kind), k, v)
        if self.launcher == "reference":
            return execute(metadata, layer, q, self.pool)
        if not isinstance(metadata, PageTableMetadata):
            raise TypeError(f"fa3: needs PageTableMetadata, got {type(metadata).__name__}")
        return self._attend(layer, q, metadata)

    def _eager_table(self, batch: ForwardBatch, kind: KVKind) -> torch.Tensor:
        source = self.translator.index_table_for_batch(batch).of(kind)
        if source.is_translated and source.entry_page_size == self.translator.page_size:
            return source.ids  # its rows are the batch's, in order
        columns = -(-batch.max_seq_len // self.translator.page_size)
        table = torch.zeros(batch.size, columns, dtype=torch.int32, device=self.pool.device)
        self.translator.fill_read_table(batch, kind, table)
        return table

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

    def _pages(self, view: torch.Tensor) -> torch.Tensor:
        """[rows, kv_heads, head_dim] -> [pages, page_size, kv_heads, head_dim], no copy."""
        return view.view(-1, self.translator.page_size, *view.shape[1:])


class _Captured:
    """Stable tables, lengths and write ids of captured decode batches; refilled in place, never rebound."""

    def __init__(self, backend: Fa3Backend, max_batch: int) -> None:
        if max_batch < 1:
            raise InputError("max_batch", max_batch, "a positive number of requests")
        self.translator, self.max_batch = backend.translator, max_batch
        device = backend.pool.device
        self.tables: CaptureTables = self.translator.make_capture_tables(max_batch)
        self.seq_lens = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self.cu_query_lens = torch.arange(max_batch + 1, dtype=torch.int32, device=device)
        self.write_ids = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self.window_write_ids = None if self.tables.window is None else torch.zeros_like(self.write_ids)

    def refill(self, batch: ForwardBatch) -> PageTableMetadata:
        require_capturable(batch, self.max_batch)
        size, window = batch.size, self.tables.window
        self.seq_lens[:size].copy_(batch.seq_lens)
        self.translator.fill_read_table(batch, KVKind.FULL, self.tables.full)
        write_ids = refill_write_ids(self.write_ids, batch, KVKind.FULL)
        window_write_ids = None
        if window is not None and self.window_write_ids is not None:
            self.translator.fill_read_table(batch, KVKind.WINDOW, window)
            written = refill_write_ids(self.window_write_ids, batch, KVKind.WINDOW)
            window_write_ids = KernelIds(written, KVKind.WINDOW)
        return PageTableMetadata(
            mode=batch.mode,
            seq_lens=self.seq_lens[:size],
            cu_query_lens=self.cu_query_lens[: size + 1],
            max_query_len=1,
            max_seq_len=self.translator.req_to_token.shape[1],
            write_ids=KernelIds(write_ids, KVKind.FULL),
            window_write_ids=window_write_ids,
            page_size=self.translator.page_size,
            page_table=self.tables.full[:size],
            window_page_table=None if window is None else window[:size],
        )


def _native_refusal(device: str) -> str | None:
    if device != "cuda" or not torch.cuda.is_available():
        return f"fa3: needs sm_80 to sm_90, got {'no GPU' if device == 'cuda' else device}"
    capability = torch.cuda.get_device_capability()
    if not ARCHITECTURES[0] <= capability <= ARCHITECTURES[1]:
        return f"fa3: needs sm_80 to sm_90, got sm_{capability[0]}{capability[1]}"
    if importlib.util.find_spec("sgl_kernel") is None:
        return "fa3: needs the package sglang-kernel, got none installed"
    return None
