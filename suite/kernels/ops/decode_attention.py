"""Decode attention over a CSR stream: as many queries for every request, split over its keys, then merged.

One query per request is a decode, more are a verify. A program serves one KV head of one request and one
split of its stream; rows of its tile are (query, head of the group) pairs, so every K and V row is read
once. The number of splits is fixed at launch and the ranges come from the stream on the device, so a
captured launch follows any length. No atomics: the same input gives the same bits. Softmax runs in base 2,
in fp32.
"""

import torch
import triton
import triton.language as tl

from suite.kernels.ops.interpreter import INTERPRETED

LOG2_E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-1.0e30)  # below every score, and finite: the difference of two of them is 0
MIN_TILE = 16  # tensor cores multiply tiles of at least 16 rows
# head width -> (keys per block, warps, stages): the fastest of 15 on an H200 with 4,096 tokens a request
TUNED = {64: (64, 2, 4), 128: (128, 4, 2), 256: (32, 4, 2)}
MAX_TILE = 64  # rows of queries: with a head of 128 their fp32 sums are half of a program's registers


def decode_attention(
    q: torch.Tensor,
    k_view: torch.Tensor,
    v_view: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
    splits: int,
    queries: int = 1,
    window: int | None = None,
) -> torch.Tensor:
    """Attend q [batch * queries, q_heads, head_dim] over rows `indices[indptr[r] : indptr[r + 1]]` of the views.

    A request's queries are the newest tokens of its stream and causal among themselves; of more than one, each sees
    `window` tokens, itself included. One query sees its whole stream, which starts where its window does.
    k_view, v_view: [rows, kv_heads, head_dim or v_head_dim], may stride over rows. indptr: [batch + 1], indices:
    int32. sinks: [q_heads] fp32 or None. An empty stream gives 0. Returns [tokens, q_heads, v_head_dim] in q's dtype.
    """
    tokens, q_heads, head_dim = q.shape
    kv_heads, v_head_dim = v_view.shape[1:]
    q = q if q.stride(2) == 1 else q.contiguous()
    # the interpreter truncates fp32 to bf16, torch rounds
    dtype = torch.float32 if INTERPRETED else q.dtype
    out = torch.empty(tokens, q_heads, v_head_dim, dtype=dtype, device=q.device)
    partial, lse = out, out
    if splits > 1:
        partial = torch.empty(tokens, q_heads, splits, v_head_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(tokens, q_heads, splits, dtype=torch.float32, device=q.device)
    block_d, block_v = triton.next_power_of_2(head_dim), triton.next_power_of_2(v_head_dim)
    lanes, rows, tiles = tiles_of(q_heads // kv_heads, queries)
    block_n, warps, stages = TUNED[max(64, block_d)]
    if rows > MIN_TILE:
        warps = max(warps, 4 if block_v <= 128 else 8)
    _split_kernel[(kv_heads * tiles, indptr.numel() - 1, splits)](
        q,
        q.stride(0),
        q.stride(1),
        k_view,
        k_view.stride(0),
        v_view,
        v_view.stride(0),
        indptr,
        indices,
        sinks,
        scale,
        out,
        partial,
        lse,
        KV_HEADS=kv_heads,
        GROUPS=q_heads // kv_heads,
        LANES=lanes,
        QUERIES=queries,
        TILES=tiles,
        WINDOW=window or 0 if queries > 1 else 0,
        HEAD_DIM=head_dim,
        V_HEAD_DIM=v_head_dim,
        SPLITS=splits,
        BLOCK_M=rows,
        BLOCK_N=128 if INTERPRETED else block_n,
        BLOCK_D=block_d,
        BLOCK_V=block_v,
        UPCAST=INTERPRETED,
        num_warps=warps,
        num_stages=stages,
    )
    if splits > 1:
        _merge_kernel[(q_heads, tokens)](
            partial,
            lse,
            sinks,
            out,
            HEAD_DIM=v_head_dim,
            SPLITS=splits,
            BLOCK_S=triton.next_power_of_2(splits),
            BLOCK_D=block_v,
            num_warps=2,
        )
    return out.to(q.dtype)


def tiles_of(groups: int, queries: int) -> tuple[int, int, int]:
    """(rows that one query takes, rows of a tile, tiles of a request) for `groups` query heads per KV head."""
    lanes = triton.next_power_of_2(groups)
    if queries == 1:
        rows = max(MIN_TILE, lanes)
        return rows, rows, 1
    largest = max(lanes, 512 if INTERPRETED else MAX_TILE)  # the interpreter pays per program, hardly per row
    rows = max(MIN_TILE, min(largest, lanes * triton.next_power_of_2(queries)))
    return lanes, rows, triton.cdiv(queries, rows // lanes)


@triton.jit
def online_softmax(scores, top, total):
    """One block of base-2 scores -> (weights, decay of what was summed before, new top, new total)."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    decay = tl.exp2(top - new_top)
    weights = tl.exp2(scores - new_top[:, None])
    return weights, decay, new_top, total * decay + tl.sum(weights, 1)


@triton.jit
def join_sink(acc, top, total, sink):
    """Normalise; the sink, a base-2 logit per row, joins the denominator and adds no value."""
    new_top = tl.maximum(top, sink)
    decay = tl.exp2(top - new_top)
    total = total * decay + tl.exp2(sink - new_top)
    return acc * (decay / total)[:, None]


@triton.jit
def _split_kernel(
    q,
    q_token_stride,
    q_head_stride,
    k_view,
    k_row_stride,
    v_view,
    v_row_stride,
    indptr,
    indices,
    sinks,
    scale,
    out,
    partial,
    lse,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
    QUERIES: tl.constexpr,
    TILES: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    UPCAST: tl.constexpr,
):
    kv_head = tl.program_id(0) // TILES
    request = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    begin = tl.load(indptr + request).to(tl.int64)
    length = (tl.load(indptr + request + 1).to(tl.int64) - begin).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_N) * BLOCK_N
    first = split * share
    last = tl.minimum(first + share, length)

    lane = tl.arange(0, BLOCK_M)
    at_query = (tl.program_id(0) % TILES) * (BLOCK_M // LANES) + lane // LANES
    token = request * QUERIES + at_query
    head = kv_head * GROUPS + lane % LANES
    dim = tl.arange(0, BLOCK_D)
    v_dim = tl.arange(0, BLOCK_V)
    real = (lane % LANES < GROUPS) & (at_query < QUERIES)
    query = tl.load(
        q + token[:, None] * q_token_stride + head[:, None] * q_head_stride + dim[None, :],
        mask=real[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    if UPCAST:
        query = query.to(tl.float32)
    position = length - QUERIES + at_query  # in the stream

    top = tl.full([BLOCK_M], NOTHING, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for block in range(first, last, BLOCK_N):
        at = block + tl.arange(0, BLOCK_N)
        inside = at < last
        row = tl.load(indices + begin + at, mask=inside, other=0).to(tl.int64)
        # int64: row * stride passes 2^31 in a large pool. Masked to 0: what is not ours may be NaN, and 0 * NaN is NaN
        k_at = row * k_row_stride + kv_head * HEAD_DIM
        keys = tl.load(
            k_view + k_at[None, :] + dim[:, None], mask=inside[None, :] & (dim < HEAD_DIM)[:, None], other=0.0
        )
        if UPCAST:
            keys = keys.to(tl.float32)
        scores = tl.dot(query, keys, input_precision="ieee") * (scale * LOG2_E)
        visible = inside[None, :]
        if QUERIES > 1:
            visible = visible & (at[None, :] <= position[:, None])
            if WINDOW > 0:
                visible = visible & (at[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        weights, decay, top, total = online_softmax(scores, top, total)
        v_at = row * v_row_stride + kv_head * V_HEAD_DIM
        values = tl.load(
            v_view + v_at[:, None] + v_dim[None, :], mask=inside[:, None] & (v_dim < V_HEAD_DIM)[None, :], other=0.0
        )
        if UPCAST:
            values = values.to(tl.float32)
        acc = acc * decay[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")

    written = real[:, None] & (v_dim < V_HEAD_DIM)[None, :]
    at_head = token * (KV_HEADS * GROUPS) + head
    if SPLITS == 1:
        sink = tl.full([BLOCK_M], NOTHING, tl.float32)
        if sinks is not None:
            sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2_E
        result = join_sink(acc, top, total, sink)
        tl.store(out + at_head[:, None] * V_HEAD_DIM + v_dim[None, :], result.to(out.dtype.element_ty), mask=written)
    else:
        # a query may see nothing of this split: it writes no partial, and NOTHING as its weight
        seen = total > 0.0
        total = tl.where(seen, total, 1.0)
        at_split = at_head * SPLITS + split
        at_partial = at_split[:, None] * V_HEAD_DIM + v_dim[None, :]
        tl.store(partial + at_partial, acc / total[:, None], mask=written & seen[:, None])
        tl.store(lse + at_split, top + tl.log2(total), mask=real)


@triton.jit
def _merge_kernel(
    partial,
    lse,
    sinks,
    out,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    head = tl.program_id(0)
    query = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + head
    split = tl.arange(0, BLOCK_S)
    dim = tl.arange(0, BLOCK_D)
    weight = tl.load(lse + query * SPLITS + split, mask=split < SPLITS, other=NOTHING)
    filled = weight > NOTHING  # an empty split wrote no partial: what lies there must not be multiplied
    top = tl.max(weight, 0)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
    weight = tl.where(filled, tl.exp2(weight - top), 0.0)
    total = tl.sum(weight, 0)
    if sinks is not None:
        total += tl.exp2(sink - top)
    parts = tl.load(
        partial + (query * SPLITS + split)[:, None] * HEAD_DIM + dim[None, :],
        mask=filled[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    merged = tl.sum(parts * weight[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + query * HEAD_DIM + dim, merged.to(out.dtype.element_ty), mask=dim < HEAD_DIM)
