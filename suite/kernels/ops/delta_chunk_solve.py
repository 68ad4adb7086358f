"""The triangular system of a chunk: I + L inverted and applied to keys and values.

Diagonal blocks of 16 by substitution, four at once; then the matrix of blocks, whose strictly lower part N
vanishes at its fourth power: (I + N)^-1 = (I - N) (I + N^2).
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from suite.kernels.ops.delta_chunk_scores import BLOCK, CHUNK, PRECISION, ChunkLocal, head_shape, tile
from suite.kernels.ops.delta_step import StepInputs

if TYPE_CHECKING:
    from suite.kernels.ops.delta_chunk import ChunkPlan


def chunk_solve(
    inputs: StepInputs, local: ChunkLocal, system: torch.Tensor, plan: "ChunkPlan"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(I + L)^-1 times beta K e^G [tokens, v_heads, K] and times beta V [tokens, v_heads, V], both fp32."""
    shape, device = head_shape(inputs), inputs.v.device
    tokens, v_heads, v_dim = inputs.v.shape
    assert inputs.beta is not None
    seen = torch.empty(tokens, v_heads, shape["K_DIM"], dtype=torch.float32, device=device)
    written = torch.empty(tokens, v_heads, v_dim, dtype=torch.float32, device=device)
    _solve_kernel[(plan.count, v_heads)](
        local.k,
        inputs.v,
        inputs.v.stride(0),
        local.total,
        inputs.beta.contiguous(),
        system,
        seen,
        written,
        plan.firsts,
        plan.lens,
        G_PER_CHANNEL=inputs.per_channel,
        BLOCK_V=tile(v_dim),
        PRECISION=PRECISION,
        **shape,
        num_warps=8,
    )
    return seen, written


@triton.jit
def _solve_kernel(
    k,
    v,
    v_stride,
    total,
    beta,
    system,
    seen,
    written,
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
    chunk, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lens + chunk)
    at = tl.arange(0, CHUNK)
    real_row = at < length
    lower = (at[:, None] > at[None, :]) & real_row[:, None]
    square = (chunk.to(tl.int64) * V_HEADS + head) * (CHUNK * CHUNK) + at[:, None] * CHUNK + at[None, :]
    matrix = tl.load(system + square, mask=lower, other=0.0)

    same = (at // BLOCK)[:, None] == (at // BLOCK)[None, :]
    inverse = tl.where(same, -matrix, 0.0)
    for lane in range(1, BLOCK):
        here = (at % BLOCK == lane)[:, None]
        row = tl.sum(tl.where(here, inverse, 0.0), 0)  # this row of every diagonal block, side by side
        row += tl.sum(row[:, None] * inverse, 0)
        inverse = tl.where(here & same, row[None, :], inverse)
    inverse = inverse + tl.where(at[:, None] == at[None, :], 1.0, 0.0)
    below = tl.dot(inverse, tl.where(same, 0.0, matrix), input_precision=PRECISION)
    twice = tl.dot(below, inverse, input_precision=PRECISION)
    inverse += tl.dot(below, twice, input_precision=PRECISION)
    inverse -= tl.dot(below, inverse, input_precision=PRECISION)

    token = tl.load(firsts + chunk).to(tl.int64) + at
    strength = tl.load(beta + token * V_HEADS + head, mask=real_row, other=0.0)
    column = tl.arange(0, BLOCK_K)
    real = real_row[:, None] & (column < K_DIM)[None, :]
    at_key = (token * K_HEADS + head // (V_HEADS // K_HEADS))[:, None] * K_DIM + column[None, :]
    key = tl.load(k + at_key, mask=real, other=0.0) * strength[:, None]
    at_gate = (token * V_HEADS + head)[:, None]
    if G_PER_CHANNEL:
        key = key * tl.exp(tl.load(total + at_gate * K_DIM + column[None, :], mask=real, other=0.0))
    else:
        key = key * tl.exp(tl.load(total + at_gate, mask=real_row[:, None], other=0.0))
    result = tl.dot(inverse, key, input_precision=PRECISION)
    tl.store(seen + at_gate * K_DIM + column[None, :], result, mask=real)
    column = tl.arange(0, BLOCK_V)
    real = real_row[:, None] & (column < V_DIM)[None, :]
    value = tl.load(v + token[:, None] * v_stride + head * V_DIM + column[None, :], mask=real, other=0.0)
    result = tl.dot(inverse, value.to(tl.float32) * strength[:, None], input_precision=PRECISION)
    tl.store(written + at_gate * V_DIM + column[None, :], result, mask=real)
