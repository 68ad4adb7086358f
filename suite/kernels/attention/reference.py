"""The oracle: attention in fp32 with plain torch, from any backend's metadata.

`execute` needs the metadata and the pool, nothing of the backend: that is how every backend's index
logic is checked on any machine. It gathers exactly the rows that the metadata grants a request, so a
page that is stale, foreign or unbound can only reach a result through the metadata itself.
"""

from typing import TypeVar

import torch

from suite.errors import InvariantError
from suite.kernels.attention.base import (
    AttentionBackend,
    CsrMetadata,
    CsrStream,
    Metadata,
    PageTableMetadata,
)
from suite.kernels.attention.csr import CsrCapture, plan_csr, window_start
from suite.kernels.attention.support import table_refusal
from suite.kernels.batch import ForwardBatch
from suite.kernels.geometry import FP8, AttentionLayer, RunnerGeometry
from suite.kernels.ids import KVKind
from suite.kernels.pools import KVPool
from suite.records import Launcher, PoolMode

Layout = TypeVar("Layout")


class ReferenceBackend(AttentionBackend):
    """CSR metadata of its own, executed by `execute`. Serves every geometry on every device."""

    name = "reference"
    captured: CsrCapture | None = None

    @classmethod
    def launchers(cls, device: str) -> dict[Launcher, str | None]:
        return {"reference": None}

    @classmethod
    def refusal(
        cls, geometry: RunnerGeometry, pool: PoolMode, device: str, launcher: Launcher, sinks: bool
    ) -> str | None:
        if reason := table_refusal(cls.name, geometry, pool, device, launcher, sinks):
            return reason
        return cls.launcher_refusal(device, launcher)

    def plan(self, batch: ForwardBatch) -> CsrMetadata:
        return plan_csr(batch, self.translator)

    def capture(self, max_batch: int, draft_tokens: int = 1) -> None:
        self.captured = CsrCapture(self.translator, max_batch, draft_tokens)

    def replay(self, batch: ForwardBatch) -> CsrMetadata:
        if self.captured is None:
            raise InvariantError("reference: replay before capture")
        return self.captured.refill(batch)

    def forward(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, metadata: Metadata
    ) -> torch.Tensor:
        self.pool.write(layer.index, metadata.write_ids_of(layer.kind), k, v)
        return execute(metadata, layer, q, self.pool)


def execute(metadata: Metadata, layer: AttentionLayer, q: torch.Tensor, pool: KVPool) -> torch.Tensor:
    """Attend q [tokens, q_heads, head_dim] over the rows that `metadata` names, K/V already written.

    Causal: a request's query at position i sees the keys at positions i - window + 1 (0 without a window)
    to i. Returns [tokens, q_heads, out_dim] in q's dtype. Raises InvariantError for metadata that does not reach
    a key that a query must see.
    """
    seq_lens, offsets = metadata.seq_lens.tolist(), metadata.cu_query_lens.tolist()
    k_view, v_view = pool.k_view(layer.index), pool.v_view(layer.index)
    out = q.new_empty(q.shape[0], layer.q_heads, layer.out_dim)
    for request, seq_len in enumerate(seq_lens):
        mine = slice(offsets[request], offsets[request + 1])
        query_len = mine.stop - mine.start
        first = 0 if layer.window is None else window_start(seq_len, query_len, layer.window)
        rows = rows_of(metadata, layer.kind, request, first, seq_len)
        keys, values = k_view.index_select(0, rows), v_view.index_select(0, rows)
        if keys.dtype is FP8:
            k_scale, v_scale = pool.scales(layer.index)
            keys, values = keys.float() * k_scale, values.float() * v_scale
        out[mine] = attend(q[mine], keys, values, layer, seq_len - query_len - first).to(q.dtype)
    return out


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: AttentionLayer,
    first_query: int,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """One request: q [queries, q_heads, head_dim] against k, v [keys, kv_heads, dim], computed in `dtype`.

    Query i stands where key `first_query + i` stands.
    """
    queries, keys, groups = q.shape[0], k.shape[0], layer.q_heads // layer.kv_heads
    grouped = q.to(dtype).view(queries, layer.kv_heads, groups, layer.head_dim).permute(1, 2, 0, 3)
    # [kv_heads, groups * queries, keys]
    scores = grouped.reshape(layer.kv_heads, groups * queries, -1) @ k.to(dtype).permute(1, 2, 0) * layer.scale
    scores = scores.view(layer.kv_heads, groups, queries, keys)
    if queries > 1 and layer.is_causal:
        distance = torch.arange(queries, device=q.device)[:, None] + first_query - torch.arange(keys, device=q.device)
        hidden = distance < 0 if layer.window is None else (distance < 0) | (distance >= layer.window)
        scores = scores.masked_fill(hidden, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    if layer.sinks is not None:
        sinks = layer.sinks.to(dtype).view(layer.kv_heads, groups, 1, 1)
        top = torch.maximum(top, sinks)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    if layer.sinks is not None:
        total = total + (sinks - top).exp()
    weighted = (weights / total).reshape(layer.kv_heads, groups * queries, keys) @ v.to(dtype).permute(1, 0, 2)
    return weighted.view(layer.kv_heads, groups, queries, -1).permute(2, 0, 1, 3).reshape(queries, layer.q_heads, -1)


def rows_of(metadata: Metadata, kind: KVKind, request: int, first: int, end: int) -> torch.Tensor:
    """Rows [end - first] int64 of the request's positions first to end - 1, as its metadata has them."""
    if isinstance(metadata, CsrMetadata):
        stream = metadata.full if kind is KVKind.FULL else metadata.window
        return _stream_rows(_present(stream, kind), request, first, end)
    if isinstance(metadata, PageTableMetadata):
        table = metadata.page_table if kind is KVKind.FULL else metadata.window_page_table
        return _table_rows(_present(table, kind)[request], metadata.page_size, first, end)
    raise TypeError(f"reference: needs metadata of a known index layout, got {type(metadata).__name__}")


def _present(layout: Layout | None, kind: KVKind) -> Layout:
    if layout is None:
        raise TypeError(f"this metadata has no {kind} indices: its runner has no {kind} pool")
    return layout


def _stream_rows(stream: CsrStream, request: int, first: int, end: int) -> torch.Tensor:
    begin, stop = stream.indptr[request : request + 2].tolist()
    start = int(stream.starts[request])
    if first < start or end - start > stop - begin:
        raise InvariantError(
            f"request {request}: stream [{start}, {start + stop - begin}) does not hold [{first}, {end})"
        )
    return stream.indices[begin + first - start : begin + end - start].long()


def _table_rows(pages: torch.Tensor, page_size: int, first: int, end: int) -> torch.Tensor:
    if end > pages.shape[0] * page_size:
        raise InvariantError(f"page table: {pages.shape[0]} columns * page size {page_size} < {end} tokens")
    position = torch.arange(first, end, device=pages.device)
    return pages[position // page_size].long() * page_size + position % page_size
