"""The part of a chunk that needs no state: running decay and pair scores.

`chunk_local` normalises q and k and sums the log decay. `chunk_scores` computes the pair sums A and L of
`delta_chunk.py`; with a decay per channel in blocks of 16 tokens, each around the decay at its own first token,
so that no exponent is positive.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from suite.kernels.ops.delta_step import NORM_EPS, StepInputs

if TYPE_CHECKING:
    from suite.kernels.ops.delta_chunk import ChunkPlan

CHUNK = tl.constexpr(64)
BLOCK = tl.constexpr(16)  # the smallest tile of a tensor core
MIN_TILE = 16
# fp32 products in three tensor-core passes: errors of fp32's size, without the registers of plain fp32 tiles
PRECISION = "tf32x3"


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkLocal:
    """q, k: [tokens, k_heads, K] fp32 as the recurrence uses them; total: [tokens, v_heads(, K)] fp32, the sum of the
    log decay from the chunk's first token on, this one included."""

    q: torch.Tensor
    k: torch.Tensor
    total: torch.Tensor


def tile(dim: int) -> int:
    """The width of a tile over `dim` elements."""
    return max(MIN_TILE, triton.next_power_of_2(dim))


def head_shape(inputs: StepInputs) -> dict[str, int]:
    """The constants that every chunk kernel shares."""
    v_heads, v_dim = inputs.v.shape[1:]
    k_heads, k_dim = inputs.k.shape[1:]
    return {"V_HEADS": v_heads, "V_DIM": v_dim, "K_HEADS": k_heads, "K_DIM": k_dim, "BLOCK_K": tile(k_dim)}


def chunk_local(inputs: StepInputs, plan: "ChunkPlan") -> ChunkLocal:
    """One launch over (chunk, value head)."""
    shape, device = head_shape(inputs), inputs.v.device
    tokens, v_heads = inputs.v.shape[:2]
    q, k = (torch.empty(inputs.k.shape, dtype=torch.float32, device=device) for _ in range(2))
    width = (inputs.k.shape[2],) if inputs.per_channel else ()
    total = torch.empty(tokens, v_heads, *width, dtype=torch.float32, device=device)
    _local_kernel[(plan.count, v_heads)](
        inputs.q,
        inputs.q.stride(0),
        inputs.k,
        inputs.k.stride(0),
        inputs.g.contiguous(),
        q,
        k,
        total,
        plan.firsts,
        plan.lens,
        shape["K_DIM"] ** -0.5,
        UNIT=inputs.beta is not None,
        G_PER_TOKEN=inputs.g.ndim > 1,
        G_PER_CHANNEL=inputs.per_channel,
        **shape,
    )
    return ChunkLocal(q=q, k=k, total=total)


def chunk_scores(inputs: StepInputs, local: ChunkLocal, plan: "ChunkPlan") -> tuple[torch.Tensor, torch.Tensor | None]:
    """(A, L) as [chunks, v_heads, 64, 64] fp32, defined in their lower triangles only; L is None without the delta."""
    shape, device, v_heads = head_shape(inputs), inputs.v.device, inputs.v.shape[1]
    size = (plan.count, v_heads, int(CHUNK), int(CHUNK))
    reads = torch.empty(size, dtype=torch.float32, device=device)
    system = None if inputs.beta is None else torch.empty_like(reads)
    beta = None if inputs.beta is None else inputs.beta.contiguous()
    args = (local.q, local.k, local.total, beta, reads, system, plan.firsts, plan.lens)
    if inputs.per_channel:
        _channel_scores_kernel[(plan.count, v_heads, int(CHUNK) // int(BLOCK))](
            *args, PRECISION=PRECISION, **shape, num_warps=4, num_stages=1
        )
    else:
        _head_scores_kernel[(plan.count, v_heads)](*args, PRECISION=PRECISION, **shape, num_warps=4)
    return reads, system


@triton.jit
def _local_kernel(
    q,
    q_stride,
    k,
    k_stride,
    g,
    out_q,
    out_k,
    total,
    firsts,
    lens,
    scale,
    UNIT: tl.constexpr,
    G_PER_TOKEN: tl.constexpr,
    G_PER_CHANNEL: tl.constexpr,
    V_HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    K_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    chunk, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lens + chunk)
    at = tl.arange(0, CHUNK)
    token = tl.load(firsts + chunk).to(tl.int64) + at
    column = tl.arange(0, BLOCK_K)
    real_row = at < length
    real = real_row[:, None] & (column < K_DIM)[None, :]
    GROUP: tl.constexpr = V_HEADS // K_HEADS
    if head % GROUP == 0:
        in_head = (head // GROUP * K_DIM + column)[None, :]
        query = tl.load(q + token[:, None] * q_stride + in_head, mask=real, other=0.0).to(tl.float32)
        key = tl.load(k + token[:, None] * k_stride + in_head, mask=real, other=0.0).to(tl.float32)
        if UNIT:
            query = query * tl.rsqrt(tl.sum(query * query, 1) + NORM_EPS)[:, None]
            key = key * tl.rsqrt(tl.sum(key * key, 1) + NORM_EPS)[:, None]
        at_out = token[:, None] * (K_HEADS * K_DIM) + in_head
        tl.store(out_q + at_out, query * scale, mask=real)
        tl.store(out_k + at_out, key, mask=real)
    if G_PER_CHANNEL:
        at_gate = (token * V_HEADS + head)[:, None] * K_DIM + column[None, :]
        decay = tl.load(g + at_gate, mask=real, other=0.0)
        tl.store(total + at_gate, tl.cumsum(decay, 0), mask=real)
    else:
        at_gate = token * V_HEADS + head
        if G_PER_TOKEN:
            decay = tl.load(g + at_gate, mask=real_row, other=0.0)
        else:
            decay = tl.where(real_row, tl.load(g + head), 0.0)
        tl.store(total + at_gate, tl.cumsum(decay, 0), mask=real_row)


@triton.jit
def _head_scores_kernel(
    q,
    k,
    total,
    beta,
    reads,
    system,
    firsts,
    lens,
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
    token = tl.load(firsts + chunk).to(tl.int64) + at
    column = tl.arange(0, BLOCK_K)
    real_row = at < length
    real = real_row[:, None] & (column < K_DIM)[None, :]
    at_key = (token * K_HEADS + head // (V_HEADS // K_HEADS))[:, None] * K_DIM + column[None, :]
    key = tl.load(k + at_key, mask=real, other=0.0)
    query = tl.load(q + at_key, mask=real, other=0.0)
    decay = tl.load(total + token * V_HEADS + head, mask=real_row, other=0.0)
    seen = (at[:, None] >= at[None, :]) & real_row[:, None]
    apart = tl.exp(tl.where(seen, decay[:, None] - decay[None, :], float("-inf")))
    square = (chunk.to(tl.int64) * V_HEADS + head) * (CHUNK * CHUNK) + at[:, None] * CHUNK + at[None, :]
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * apart
    tl.store(reads + square, scores, mask=seen)
    if system is not None:
        strength = tl.load(beta + token * V_HEADS + head, mask=real_row, other=0.0)
        scores = tl.dot(key, tl.trans(key), input_precision=PRECISION) * apart * strength[:, None]
        tl.store(system + square, scores, mask=seen)


@triton.jit
def _channel_scores_kernel(
    q,
    k,
    total,
    beta,
    reads,
    system,
    firsts,
    lens,
    PRECISION: tl.constexpr,
    V_HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    K_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    chunk, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens + chunk)
    first_row = block * BLOCK
    if first_row >= length:
        return
    first = tl.load(firsts + chunk).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    at = first_row + lane
    column = tl.arange(0, BLOCK_K)
    real_row, real_column = at < length, column < K_DIM
    real = real_row[:, None] & real_column[None, :]
    k_head = head // (V_HEADS // K_HEADS)
    at_key = ((first + at) * K_HEADS + k_head)[:, None] * K_DIM + column[None, :]
    at_gate = ((first + at) * V_HEADS + head)[:, None] * K_DIM + column[None, :]
    key = tl.load(k + at_key, mask=real, other=0.0)
    query = tl.load(q + at_key, mask=real, other=0.0)
    decay = tl.load(total + at_gate, mask=real, other=0.0)
    strength = tl.load(beta + (first + at) * V_HEADS + head, mask=real_row, other=0.0)
    square = (chunk.to(tl.int64) * V_HEADS + head) * (CHUNK * CHUNK) + at[:, None] * CHUNK

    # earlier blocks: both sides meet at the decay of this block's first token
    meet = tl.load(total + ((first + first_row) * V_HEADS + head) * K_DIM + column, mask=real_column, other=0.0)
    behind = tl.exp(tl.where(real, decay - meet[None, :], float("-inf")))
    for earlier in range(0, first_row, BLOCK):
        row = first + earlier + lane
        at_old = (row * K_HEADS + k_head)[:, None] * K_DIM + column[None, :]
        old_key = tl.load(k + at_old, mask=real_column[None, :], other=0.0)
        at_old = (row * V_HEADS + head)[:, None] * K_DIM + column[None, :]
        old_decay = tl.load(total + at_old, mask=real_column[None, :], other=0.0)
        old_key = tl.trans(old_key * tl.exp(meet[None, :] - old_decay))
        cell = square + (earlier + lane)[None, :]
        inside = real_row[:, None] & (lane >= 0)[None, :]
        tl.store(reads + cell, tl.dot(query * behind, old_key, input_precision=PRECISION), mask=inside)
        scores = tl.dot(key * behind, old_key, input_precision=PRECISION) * strength[:, None]
        tl.store(system + cell, scores, mask=inside)

    # this block against itself, one column of keys after the other
    asked = tl.zeros([BLOCK, BLOCK], tl.float32)
    known = tl.zeros([BLOCK, BLOCK], tl.float32)
    for other in range(0, tl.minimum(BLOCK, length - first_row)):
        row = first + first_row + other
        old_key = tl.load(k + (row * K_HEADS + k_head) * K_DIM + column, mask=real_column, other=0.0)
        old_decay = tl.load(total + (row * V_HEADS + head) * K_DIM + column, mask=real_column, other=0.0)
        seen = real & (lane >= other)[:, None]
        apart = tl.exp(tl.where(seen, decay - old_decay[None, :], float("-inf"))) * old_key[None, :]
        mine = (lane == other)[None, :]
        asked = tl.where(mine, tl.sum(query * apart, 1)[:, None], asked)
        known = tl.where(mine, tl.sum(key * apart, 1)[:, None], known)
    seen = (lane[:, None] >= lane[None, :]) & real_row[:, None]
    tl.store(reads + square + at[None, :], asked, mask=seen)
    tl.store(system + square + at[None, :], known * strength[:, None], mask=seen)
