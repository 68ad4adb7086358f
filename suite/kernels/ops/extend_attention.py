"""Extend attention over a CSR stream: any number of new tokens per request, causal, after their write.

A program serves one KV head and one tile of queries: tile rows are (query, head of the group) pairs, so
every K and V row is read once per tile. Prefix and new tokens come from the same stream, so one id space
and one translation serve both. fp32 accumulators, base-2 softmax, no atomics.
"""

import torch
import triton
import triton.language as tl

from suite.kernels.ops.decode_attention import LOG2_E, MIN_TILE, NOTHING, join_sink, online_softmax
from suite.kernels.ops.interpreter import INTERPRETED


def extend_attention(
    q: torch.Tensor,
    k_view: torch.Tensor,
    v_view: torch.Tensor,
    cu_query_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    max_query_len: int,
) -> torch.Tensor:
    """Attend q [tokens, q_heads, head_dim]; request r's queries are its newest tokens.

    `indices[indptr[r] + i]` is the row of position `starts[r] + i` in the views [rows, kv_heads, head_dim].
    A query at position p sees positions p - window + 1 (0 without a window) to p. sinks: [q_heads] fp32
    or None. max_query_len, known to the host, sizes the grid. Views may stride over rows, and values may be
    narrower than keys: returns [tokens, q_heads, v_head_dim] in q's dtype.
    """
    tokens, q_heads, head_dim = q.shape
    kv_heads, v_head_dim = v_view.shape[1:]
    q = q if q.stride(2) == 1 else q.contiguous()
    # the interpreter truncates fp32 to bf16, torch rounds
    dtype = torch.float32 if INTERPRETED else q.dtype
    out = torch.empty(tokens, q_heads, v_head_dim, dtype=dtype, device=q.device)
    groups = q_heads // kv_heads
    lanes = triton.next_power_of_2(groups)
    tile = max(lanes, tile_rows(max_query_len * lanes, head_dim))
    _extend_kernel[(triton.cdiv(max_query_len, tile // lanes), kv_heads, seq_lens.numel())](
        q,
        q.stride(0),
        q.stride(1),
        k_view,
        k_view.stride(0),
        v_view,
        v_view.stride(0),
        cu_query_lens,
        seq_lens,
        starts,
        indptr,
        indices,
        sinks,
        scale,
        out,
        WINDOW=window or 0,
        KV_HEADS=kv_heads,
        GROUPS=groups,
        LANES=lanes,
        HEAD_DIM=head_dim,
        V_HEAD_DIM=v_head_dim,
        BLOCK_M=tile,
        BLOCK_N=128 if INTERPRETED else 64,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_V=triton.next_power_of_2(v_head_dim),
        UPCAST=INTERPRETED,
        num_warps=8 if tile >= 128 else 4,
        num_stages=3 if 64 < head_dim <= 128 else 2,
    )
    return out.to(q.dtype)


def tile_rows(rows: int, head_dim: int) -> int:
    """Rows of a tile: all of a short request's, else what was fastest on an H200 at 2,048 tokens."""
    largest = 128 if head_dim > 128 else 64
    if INTERPRETED:
        largest = 512  # the interpreter pays per program, hardly per row
    return max(MIN_TILE, min(largest, triton.next_power_of_2(rows)))


@triton.jit
def _extend_kernel(
    q,
    q_token_stride,
    q_head_stride,
    k_view,
    k_row_stride,
    v_view,
    v_row_stride,
    cu_query_lens,
    seq_lens,
    starts,
    indptr,
    indices,
    sinks,
    scale,
    out,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # the last tiles see the most keys, so they start first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    request = tl.program_id(2)
    QUERIES: tl.constexpr = BLOCK_M // LANES
    first_token = tl.load(cu_query_lens + request).to(tl.int64)
    query_len = (tl.load(cu_query_lens + request + 1).to(tl.int64) - first_token).to(tl.int32)
    if tile * QUERIES >= query_len:
        return
    seq_len = tl.load(seq_lens + request).to(tl.int32)
    start = tl.load(starts + request).to(tl.int32)
    stream = indices + tl.load(indptr + request).to(tl.int64)

    lane = tl.arange(0, BLOCK_M)
    query = tile * QUERIES + lane // LANES
    head = kv_head * GROUPS + lane % LANES
    dim = tl.arange(0, BLOCK_D)
    v_dim = tl.arange(0, BLOCK_V)
    real_row = (query < query_len) & (lane % LANES < GROUPS)
    real = real_row[:, None] & (dim < HEAD_DIM)[None, :]
    token = first_token + query
    asked = tl.load(
        q + token[:, None] * q_token_stride + head[:, None] * q_head_stride + dim[None, :], mask=real, other=0.0
    )
    if UPCAST:
        asked = asked.to(tl.float32)

    position = seq_len - query_len + query
    last = tl.minimum(seq_len, seq_len - query_len + (tile + 1) * QUERIES) - start
    first = 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - query_len + tile * QUERIES - WINDOW + 1, start) - start
    top = tl.full([BLOCK_M], NOTHING, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for block in range(first, last, BLOCK_N):
        at = block + tl.arange(0, BLOCK_N)
        inside = at < last
        row = tl.load(stream + at, mask=inside, other=0).to(tl.int64)
        # int64: row * stride passes 2^31 in a large pool. Masked to 0: what is not ours may be NaN, and 0 * NaN is NaN
        k_at = row * k_row_stride + kv_head * HEAD_DIM
        keys = tl.load(
            k_view + k_at[None, :] + dim[:, None], mask=inside[None, :] & (dim < HEAD_DIM)[:, None], other=0.0
        )
        if UPCAST:
            keys = keys.to(tl.float32)
        distance = position[:, None] - (start + at)[None, :]
        visible = inside[None, :] & (distance >= 0)
        if WINDOW > 0:
            visible = visible & (distance < WINDOW)
        scores = tl.dot(asked, keys, input_precision="ieee") * (scale * LOG2_E)
        scores = tl.where(visible, scores, float("-inf"))
        weights, decay, top, total = online_softmax(scores, top, total)
        v_at = row * v_row_stride + kv_head * V_HEAD_DIM
        values = tl.load(
            v_view + v_at[:, None] + v_dim[None, :], mask=inside[:, None] & (v_dim < V_HEAD_DIM)[None, :], other=0.0
        )
        if UPCAST:
            values = values.to(tl.float32)
        acc = acc * decay[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")

    sink = tl.full([BLOCK_M], NOTHING, tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=lane % LANES < GROUPS, other=0.0).to(tl.float32) * LOG2_E
    result = join_sink(acc, top, total, sink)
    at_out = (token * (KV_HEADS * GROUPS) + head)[:, None] * V_HEAD_DIM + v_dim[None, :]
    tl.store(out + at_out, result.to(out.dtype.element_ty), mask=real_row[:, None] & (v_dim < V_HEAD_DIM)[None, :])
