"""Absorbed MLA over a CSR stream of latent rows: decode, verify and extend, split over the keys, then merged.

A latent row is [latent | rotary key]: one KV head whose key is the whole row and whose value is the
latent. A program serves one tile of queries of one request and one split of its keys. Rows of the tile
are (query, head) pairs, so a latent row is loaded once for all of them, and the same tile in shared
memory is key and value. The number of splits is fixed at launch, their ranges come from the lengths on
the device, so a captured launch follows any length. No atomics: the same input gives the same bits.
Softmax runs in base 2, in fp32.
"""

import torch
import triton
import triton.language as tl

from suite.errors import InputError
from suite.kernels.ops.decode_attention import LOG2_E, MIN_TILE, NOTHING, _merge_kernel, online_softmax
from suite.kernels.ops.interpreter import INTERPRETED
from suite.kernels.ops.mla_tiles import MlaTile, lanes_of, tile_for


def mla_attention(
    q: torch.Tensor,
    rows: torch.Tensor,
    cu_query_lens: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    latent_dim: int,
    scale: float,
    max_query_len: int,
    splits: int,
    tile: MlaTile | None = None,
) -> torch.Tensor:
    """Attend q [tokens, q_heads, latent_dim + rope] over latent rows; a request's queries are its newest tokens.

    rows: [all rows, latent_dim + rope], may stride over rows. Request r reads `indices[indptr[r] : indptr[r + 1]]`,
    its whole sequence, new tokens included; a query sees the keys up to its own position. cu_query_lens, indptr:
    [batch + 1], all int32. max_query_len, known to the host, sizes the grid. Returns [tokens, q_heads, latent_dim]
    in q's dtype. Raises InputError for widths that no tile takes.
    """
    tokens, q_heads, width = q.shape
    rope_dim = width - latent_dim
    for name, value in (("latent_dim", latent_dim), ("rope_dim", rope_dim)):
        if value < MIN_TILE or value & (value - 1):
            raise InputError(name, value, f"a power of two, at least {MIN_TILE}")
    q = q if q.stride(2) == 1 else q.contiguous()
    # the interpreter truncates fp32 to bf16, torch rounds
    out = torch.empty(tokens, q_heads, latent_dim, dtype=torch.float32 if INTERPRETED else q.dtype, device=q.device)
    partial, lse = out, out
    if splits > 1:
        partial = torch.empty(tokens, q_heads, splits, latent_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(tokens, q_heads, splits, dtype=torch.float32, device=q.device)
    tile, lanes = tile or tile_for(q_heads, max_query_len), lanes_of(q_heads)
    query_tiles, head_tiles = triton.cdiv(max_query_len, max(1, tile.rows // lanes)), triton.cdiv(q_heads, lanes)
    _mla_kernel[(query_tiles * head_tiles, indptr.numel() - 1, splits)](
        q,
        q.stride(0),
        q.stride(1),
        rows,
        rows.stride(0),
        cu_query_lens,
        indptr,
        indices,
        scale,
        out,
        partial,
        lse,
        splits,
        Q_HEADS=q_heads,
        HEAD_TILES=head_tiles,
        LANES=lanes,
        LATENT=latent_dim,
        ROPE=rope_dim,
        IS_SPLIT=splits > 1,
        ONE_QUERY=max_query_len == 1,
        KEYS_FIRST=tile.keys_first,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        UPCAST=INTERPRETED,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        _merge_kernel[(q_heads, tokens)](
            partial,
            lse,
            None,
            out,
            HEAD_DIM=latent_dim,
            SPLITS=splits,
            BLOCK_S=triton.next_power_of_2(splits),
            BLOCK_D=latent_dim,
            num_warps=4 if splits <= 8 else 8,
        )
    return out.to(q.dtype)


def mla_attention_torch(
    q: torch.Tensor,
    rows: torch.Tensor,
    cu_query_lens: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    latent_dim: int,
    scale: float,
) -> torch.Tensor:
    """The same in plain torch and fp32, one request after the other, for tests."""
    out = q.new_empty(*q.shape[:2], latent_dim)
    offsets, bounds = cu_query_lens.tolist(), indptr.tolist()
    for request in range(len(bounds) - 1):
        mine = slice(offsets[request], offsets[request + 1])
        keys = rows[indices[bounds[request] : bounds[request + 1]].long()].float()
        queries, length = mine.stop - mine.start, keys.shape[0]
        scores = torch.einsum("qhd,kd->qhk", q[mine].float(), keys) * scale
        position = torch.arange(length - queries, length, device=q.device)[:, None, None]
        hidden = torch.arange(length, device=q.device)[None, None] > position
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[mine] = (weights @ keys[:, :latent_dim]).to(q.dtype)
    return out


@triton.jit
def _load_rows(
    rows,
    row_stride,
    stream,
    block,
    last,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The latent and rotary parts of one block of rows, their places in the stream, and which of them are ours."""
    at = block + tl.arange(0, N)
    inside = at < last
    row = tl.load(stream + at, mask=inside, other=0).to(tl.int64)
    # int64: row * stride passes 2^31 in a large pool. Masked to 0: what is not ours may be NaN, and 0 * NaN is NaN
    at_row = rows + row * row_stride
    latent = tl.load(at_row[:, None] + tl.arange(0, LATENT)[None, :], mask=inside[:, None], other=0.0)
    rope = tl.load(at_row[:, None] + LATENT + tl.arange(0, ROPE)[None, :], mask=inside[:, None], other=0.0)
    if UPCAST:
        latent = latent.to(tl.float32)
        rope = rope.to(tl.float32)
    return latent, rope, at, inside


@triton.jit
def _queries_first(
    q_latent, q_rope, rows, row_stride, stream, first, last, position, scale,
    LATENT: tl.constexpr, ROPE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Queries are the rows of both products: [M, N] scores, [M, LATENT] sums."""
    top = tl.full([M], NOTHING, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, LATENT], tl.float32)
    for block in range(first, last, N):
        latent, rope, at, inside = _load_rows(rows, row_stride, stream, block, last, LATENT, ROPE, N, UPCAST)
        scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee") * scale
        visible = inside[None, :] & (at[None, :] <= position[:, None])
        weights, decay, top, total = online_softmax(tl.where(visible, scores, float("-inf")), top, total)
        acc = tl.dot(weights.to(latent.dtype), latent, acc * decay[:, None], input_precision="ieee")
    return acc, top, total


@triton.jit
def _keys_first(
    q_latent, q_rope, rows, row_stride, stream, first, last, position, scale,
    LATENT: tl.constexpr, ROPE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Latent rows, then latents, are the rows of the products: [N, M] scores, [LATENT, M] sums, turned at the end.

    Hopper multiplies 64 rows at once straight from shared memory: 64 keys fill them, a few queries do not.
    """
    q_latent = tl.trans(q_latent)
    q_rope = tl.trans(q_rope)
    top = tl.full([M], NOTHING, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([LATENT, M], tl.float32)
    for block in range(first, last, N):
        latent, rope, at, inside = _load_rows(rows, row_stride, stream, block, last, LATENT, ROPE, N, UPCAST)
        scores = tl.dot(latent, q_latent, input_precision="ieee")
        scores = tl.dot(rope, q_rope, scores, input_precision="ieee") * scale
        visible = inside[:, None] & (at[:, None] <= position[None, :])
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 0))
        decay = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[None, :])
        total = total * decay + tl.sum(weights, 0)
        top = new_top
        acc = tl.dot(tl.trans(latent), weights.to(latent.dtype), acc * decay[None, :], input_precision="ieee")
    return tl.trans(acc), top, total


@triton.jit(do_not_specialize=["splits"])
def _mla_kernel(
    q,
    q_token_stride,
    q_head_stride,
    rows,
    row_stride,
    cu_query_lens,
    indptr,
    indices,
    scale,
    out,
    partial,
    lse,
    splits,
    Q_HEADS: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    LANES: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # the last queries see the most keys, so their tiles start first
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // HEAD_TILES
    first_head = (tl.program_id(0) % HEAD_TILES) * LANES
    request = tl.program_id(1)
    split = tl.program_id(2)
    QUERIES: tl.constexpr = BLOCK_M // LANES
    first_token = tl.load(cu_query_lens + request)
    query_len = tl.load(cu_query_lens + request + 1) - first_token
    if tile * QUERIES >= query_len:
        return
    begin = tl.load(indptr + request)
    seq_len = tl.load(indptr + request + 1) - begin
    visible_len = tl.minimum(seq_len, seq_len - query_len + (tile + 1) * QUERIES)
    share = tl.cdiv(tl.cdiv(visible_len, splits), BLOCK_N) * BLOCK_N
    first = split * share
    last = tl.minimum(first + share, visible_len)
    stream = indices + begin.to(tl.int64)

    lane = tl.arange(0, BLOCK_M)
    query = tile * QUERIES + lane // LANES
    head = first_head + lane % LANES
    real = (query < query_len) & (lane // LANES < QUERIES) & (head < Q_HEADS)
    latent_dim = tl.arange(0, LATENT)
    rope_dim = tl.arange(0, ROPE)
    token = (first_token + query).to(tl.int64)
    at_query = q + token * q_token_stride + head * q_head_stride
    q_latent = tl.load(at_query[:, None] + latent_dim[None, :], mask=real[:, None], other=0.0)
    q_rope = tl.load(at_query[:, None] + LATENT + rope_dim[None, :], mask=real[:, None], other=0.0)
    if UPCAST:
        q_latent = q_latent.to(tl.float32)
        q_rope = q_rope.to(tl.float32)

    # the position of a row that every key is visible to, or else the row's own
    position = tl.full([BLOCK_M], 2147483647, tl.int32) if ONE_QUERY else seq_len - query_len + query
    if KEYS_FIRST:
        acc, top, total = _keys_first(
            q_latent, q_rope, rows, row_stride, stream, first, last, position, scale * LOG2_E,
            LATENT, ROPE, BLOCK_M, BLOCK_N, UPCAST,
        )  # fmt: skip
    else:
        acc, top, total = _queries_first(
            q_latent, q_rope, rows, row_stride, stream, first, last, position, scale * LOG2_E,
            LATENT, ROPE, BLOCK_M, BLOCK_N, UPCAST,
        )  # fmt: skip

    # a row of a causal tile may see nothing of this split
    seen = total > 0.0
    total = tl.where(seen, total, 1.0)
    acc = acc / total[:, None]
    at_head = token * Q_HEADS + head
    if not IS_SPLIT:
        at_out = out + at_head[:, None] * LATENT + latent_dim[None, :]
        tl.store(at_out, acc.to(out.dtype.element_ty), mask=real[:, None])
    else:
        at_split = at_head * splits + split
        at_partial = partial + at_split[:, None] * LATENT + latent_dim[None, :]
        tl.store(at_partial, acc, mask=(real & seen)[:, None])
        tl.store(lse + at_split, top + tl.log2(total), mask=real)  # NOTHING for a row that saw nothing
