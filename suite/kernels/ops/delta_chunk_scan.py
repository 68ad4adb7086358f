"""The part of a chunk that hands the state on: a scan over the chunks of each request, then all outputs at once."""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from suite.kernels.ops.delta_chunk_scores import CHUNK, PRECISION, ChunkLocal, head_shape, tile
from suite.kernels.ops.delta_step import StepInputs
from suite.kernels.ops.interpreter import INTERPRETED

if TYPE_CHECKING:
    from suite.kernels.ops.delta_chunk import ChunkPlan


def value_tile(v_dim: int, largest: int) -> int:
    """Columns of V per program; the interpreter pays per program, hardly per column."""
    return tile(v_dim) if INTERPRETED else min(largest, tile(v_dim))


def chunk_states(
    inputs: StepInputs,
    local: ChunkLocal,
    seen: torch.Tensor | None,
    written: torch.Tensor,
    initial: torch.Tensor,
    plan: "ChunkPlan",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(final [batch, v_heads, V, K], boundaries [chunks, v_heads, V, K]), fp32.

    With the delta `written` comes without what the state knew already; that is taken off here, in place.
    """
    v_heads, v_dim = inputs.v.shape[1:]
    final = torch.empty_like(initial)
    boundaries = torch.empty(plan.count, *initial.shape[1:], dtype=torch.float32, device=initial.device)
    block_v = value_tile(v_dim, 32)
    _states_kernel[(triton.cdiv(v_dim, block_v), v_heads, initial.shape[0])](
        local.k,
        local.total,
        seen,
        written,
        initial,
        final,
        boundaries,
        plan.firsts,
        plan.lens,
        plan.cu_chunks,
        G_PER_CHANNEL=inputs.per_channel,
        BLOCK_V=block_v,
        PRECISION=PRECISION,
        **head_shape(inputs),
        num_warps=4,
        num_stages=1,  # copies of the tiles for pipelining would leave room for one program per SM
    )
    return final, boundaries


def chunk_outputs(
    inputs: StepInputs,
    local: ChunkLocal,
    reads: torch.Tensor,
    written: torch.Tensor,
    boundaries: torch.Tensor,
    plan: "ChunkPlan",
) -> torch.Tensor:
    """[tokens, v_heads, V] in v's dtype."""
    v_heads, v_dim = inputs.v.shape[1:]
    # the interpreter truncates fp32 to bf16, torch rounds
    dtype = torch.float32 if INTERPRETED else inputs.v.dtype
    out = torch.empty(inputs.v.shape, dtype=dtype, device=inputs.v.device)
    block_v = value_tile(v_dim, 64)
    _outputs_kernel[(plan.count, v_heads, triton.cdiv(v_dim, block_v))](
        local.q,
        local.total,
        reads,
        written,
        boundaries,
        out,
        plan.firsts,
        plan.lens,
        G_PER_CHANNEL=inputs.per_channel,
        BLOCK_V=block_v,
        PRECISION=PRECISION,
        **head_shape(inputs),
        num_warps=4,
    )
    return out.to(inputs.v.dtype)


@triton.jit
def _states_kernel(
    k,
    total,
    seen,
    written,
    initial,
    final,
    boundaries,
    firsts,
    lens,
    cu_chunks,
    G_PER_CHANNEL: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    V_HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    K_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    column = tl.arange(0, BLOCK_K)
    row = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    real_column, real_row = column < K_DIM, row < V_DIM
    real = real_column[:, None] & real_row[None, :]
    at = tl.arange(0, CHUNK)
    SIZE: tl.constexpr = V_HEADS * V_DIM * K_DIM
    # the tile is S^T: keys down, values across
    in_state = (head * V_DIM + row)[None, :] * K_DIM + column[:, None]
    state = tl.load(initial + request * SIZE + in_state, mask=real, other=0.0)
    first_chunk = tl.load(cu_chunks + request).to(tl.int64)
    last_chunk = tl.load(cu_chunks + request + 1).to(tl.int64)
    for chunk in range(first_chunk, last_chunk):
        tl.store(boundaries + chunk * SIZE + in_state, state, mask=real)
        length = tl.load(lens + chunk)
        first = tl.load(firsts + chunk).to(tl.int64)
        token = first + at
        inside = at < length
        keys = inside[:, None] & real_column[None, :]
        at_head = (token * V_HEADS + head)[:, None]
        at_value = at_head * V_DIM + row[None, :]
        values = inside[:, None] & real_row[None, :]
        new = tl.load(written + at_value, mask=values, other=0.0)
        if seen is not None:
            old = tl.load(seen + at_head * K_DIM + column[None, :], mask=keys, other=0.0)
            new -= tl.dot(old, state, input_precision=PRECISION)
            tl.store(written + at_value, new, mask=values)
        at_key = (token * K_HEADS + head // (V_HEADS // K_HEADS))[:, None] * K_DIM + column[None, :]
        key = tl.load(k + at_key, mask=keys, other=0.0)
        at_last = (first + length - 1) * V_HEADS + head
        if G_PER_CHANNEL:
            last = tl.load(total + at_last * K_DIM + column, mask=real_column, other=0.0)
            decay = tl.load(total + at_head * K_DIM + column[None, :], mask=keys, other=0.0)
            key = key * tl.exp(tl.where(keys, last[None, :] - decay, float("-inf")))
            state = state * tl.exp(last)[:, None]
        else:
            last = tl.load(total + at_last)
            decay = tl.load(total + token * V_HEADS + head, mask=inside, other=0.0)
            key = key * tl.exp(tl.where(inside, last - decay, float("-inf")))[:, None]
            state = state * tl.exp(last)
        state += tl.dot(tl.trans(key), new, input_precision=PRECISION)
    tl.store(final + request * SIZE + in_state, state, mask=real)


@triton.jit
def _outputs_kernel(
    q,
    total,
    reads,
    written,
    boundaries,
    out,
    firsts,
    lens,
    G_PER_CHANNEL: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    V_HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    K_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lens + chunk)
    at = tl.arange(0, CHUNK)
    token = tl.load(firsts + chunk).to(tl.int64) + at
    column = tl.arange(0, BLOCK_K)
    row = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = at < length
    keys = inside[:, None] & (column < K_DIM)[None, :]
    values = inside[:, None] & (row < V_DIM)[None, :]
    at_head = (token * V_HEADS + head)[:, None]
    at_key = (token * K_HEADS + head // (V_HEADS // K_HEADS))[:, None] * K_DIM + column[None, :]
    query = tl.load(q + at_key, mask=keys, other=0.0)
    if G_PER_CHANNEL:
        query = query * tl.exp(tl.load(total + at_head * K_DIM + column[None, :], mask=keys, other=0.0))
    else:
        query = query * tl.exp(tl.load(total + at_head, mask=inside[:, None], other=0.0))
    at_state = (chunk * V_HEADS + head) * (V_DIM * K_DIM) + row[None, :] * K_DIM + column[:, None]
    state = tl.load(boundaries + at_state, mask=(column < K_DIM)[:, None] & (row < V_DIM)[None, :], other=0.0)
    result = tl.dot(query, state, input_precision=PRECISION)
    square = (chunk * V_HEADS + head) * (CHUNK * CHUNK) + at[:, None] * CHUNK + at[None, :]
    scores = tl.load(reads + square, mask=(at[:, None] >= at[None, :]) & inside[:, None], other=0.0)
    new = tl.load(written + at_head * V_DIM + row[None, :], mask=values, other=0.0)
    result += tl.dot(scores, new, input_precision=PRECISION)
    tl.store(out + at_head * V_DIM + row[None, :], result.to(out.dtype.element_ty), mask=values)
