"""TensorRT-LLM's MHA kernels, as FlashInfer ships them: XQA on sm_90 and sm_12x, trtllm-gen on sm_10x.

Both take one int32 page table with packed rows (contiguous, row stride = columns), 0 past a request's
last page, and fp32 sinks. XQA attends one query token per request, so an extend or a verify becomes one
*lane* per new token: its request's table row, and the length up to that token. That is exact, ragged and
windowed; a long prefill reads its keys once per token and is slow. trtllm-gen takes a verify's queries as rows of
one call, and has a kernel for extends.
"""

from typing import Any

import torch

from suite.errors import InvariantError
from suite.kernels.attention.base import AttentionBackend, Metadata, PageTableMetadata
from suite.kernels.attention.page_table import PageTableCapture, plan_page_table
from suite.kernels.attention.reference import execute
from suite.kernels.attention.support import gpu_capability, native_refusal, table_refusal
from suite.kernels.batch import ForwardBatch, ForwardMode
from suite.kernels.geometry import AttentionLayer, RunnerGeometry
from suite.records import Launcher, PoolMode

DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
WORKSPACE_BYTES = 128 << 20
MAX_ROWS = 32_768  # of a table per launch: rows are the grid's third dimension, which ends at 65,535


class TrtllmMhaBackend(AttentionBackend):
    """int32 page tables; native through `flashinfer`, or the same tables through the oracle."""

    name = "trtllm_mha"
    captured: PageTableCapture | None = None
    _zeroed_workspace: torch.Tensor | None = None

    @classmethod
    def launchers(cls, device: str) -> dict[Launcher, str | None]:
        return {"native": native_refusal("trtllm_mha", device), "reference": None}

    @classmethod
    def refusal(
        cls, geometry: RunnerGeometry, pool: PoolMode, device: str, launcher: Launcher, sinks: bool
    ) -> str | None:
        if reason := table_refusal("trtllm_mha", geometry, pool, device, launcher, sinks):
            return reason
        for kv in geometry.pools:
            if kv.head_dim % 16 or kv.head_dim > MAX_HEAD_DIM:
                need = f"a head_dim that is a multiple of 16, at most {MAX_HEAD_DIM}"
                return f"trtllm_mha: needs {need}, got {kv.head_dim}"
            if launcher == "native" and kv.dtype not in DTYPES:
                return f"trtllm_mha: needs {' or '.join(map(str, DTYPES))}, got {kv.dtype}"
        return cls.launcher_refusal(device, launcher)

    def plan(self, batch: ForwardBatch) -> PageTableMetadata:
        return plan_page_table(batch.as_lanes() if self._takes_lanes else batch, self.translator)

    def capture(self, max_batch: int, draft_tokens: int = 1) -> None:
        rows, tokens = (max_batch * draft_tokens, 1) if self._takes_lanes else (max_batch, draft_tokens)
        self.captured = PageTableCapture(self.translator, rows, tokens, tail="sink")
        if self.launcher == "native":
            self._workspace()  # outside of every graph

    def replay(self, batch: ForwardBatch) -> PageTableMetadata:
        if self.captured is None:
            raise InvariantError("trtllm_mha: replay before capture")
        return self.captured.refill(batch.as_lanes() if self._takes_lanes else batch)

    def forward(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, metadata: Metadata
    ) -> torch.Tensor:
        self.pool.write(layer.index, metadata.write_ids_of(layer.kind), k, v)
        if self.launcher == "reference":
            return execute(metadata, layer, q, self.pool)
        if not isinstance(metadata, PageTableMetadata):
            raise TypeError(f"trtllm_mha: needs PageTableMetadata, got {type(metadata).__name__}")
        table = metadata.table_of(layer.kind)
        if not table.is_contiguous():
            raise InvariantError(f"page table: row stride {table.stride(0)} != {table.shape[1]} columns")
        attend = self._attend_ragged if metadata.mode is ForwardMode.EXTEND else self._attend_uniform
        return attend(layer, q.contiguous(), metadata, table)

    @property
    def _takes_lanes(self) -> bool:
        """Whether the kernels for this GPU attend one query per table row."""
        return self.launcher == "native" and _kernels() == "xqa"

    def _attend_uniform(
        self, layer: AttentionLayer, q: torch.Tensor, metadata: PageTableMetadata, table: torch.Tensor
    ) -> torch.Tensor:
        """As many query tokens for every table row: one on XQA."""
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache  # a GPU library

        out, queries = torch.empty_like(q), metadata.max_query_len
        for first in range(0, table.shape[0], MAX_ROWS):
            some, mine = slice(first, first + MAX_ROWS), slice(first * queries, (first + MAX_ROWS) * queries)
            trtllm_batch_decode_with_kv_cache(
                query=q[mine],
                block_tables=table[some],
                seq_lens=metadata.seq_lens[some],
                max_seq_len=metadata.max_seq_len,
                out=out[mine],
                q_len_per_req=queries,
                backend=_kernels(),
                **self._common(layer),
            )
        return out

    def _attend_ragged(
        self, layer: AttentionLayer, q: torch.Tensor, metadata: PageTableMetadata, table: torch.Tensor
    ) -> torch.Tensor:
        """Any number of query tokens per table row: trtllm-gen only."""
        from flashinfer.prefill import trtllm_batch_context_with_kv_cache  # a GPU library

        lens = metadata.seq_lens
        out: torch.Tensor = trtllm_batch_context_with_kv_cache(
            query=q,
            block_tables=table,
            seq_lens=lens,
            max_q_len=metadata.max_query_len,
            max_kv_len=metadata.max_seq_len,
            batch_size=lens.numel(),
            cum_seq_lens_q=metadata.cu_query_lens,
            cum_seq_lens_kv=torch.cat([lens.new_zeros(1), lens.cumsum(0, dtype=torch.int32)]),
            **self._common(layer),
        )
        return out

    def _common(self, layer: AttentionLayer) -> dict[str, Any]:
        """What both calls take. `window_left` counts the tokens to the left of the query, itself apart."""
        return {
            "kv_cache": (
                self.pool.paged(self.pool.k_view(layer.index)),
                self.pool.paged(self.pool.v_view(layer.index)),
            ),
            "workspace_buffer": self._workspace(),
            "bmm1_scale": layer.scale,
            "bmm2_scale": 1.0,
            "window_left": -1 if layer.window is None else layer.window - 1,
            "sinks": layer.sinks,
            "kv_layout": "NHD",
        }

    def _workspace(self) -> torch.Tensor:
        """Counters and partial results, allocated with the first forward and never rebound: graphs hold its address."""
        if self._zeroed_workspace is None:  # the kernels leave their counters at zero, as they need them
            self._zeroed_workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.pool.device)
        return self._zeroed_workspace


def _kernels() -> str:
    """FlashInfer's name of the kernels for this GPU."""
    capability = gpu_capability()
    return "trtllm-gen" if capability is not None and capability[0] == 10 else "xqa"
