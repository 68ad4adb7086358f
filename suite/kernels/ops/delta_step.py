"""Token-by-token recurrence over strided state slots: decode, and verify of draft chains and trees.

    S <- S exp(g);  u = beta (v - S k);  S <- S + u k^T;  o = S q

One program serves one value head of one request and a block of the state's rows, so its tile of S stays in
registers for all tokens. Decode writes S back to its slot. Verify only reads the slot and leaves the state after
draft token j in scratch. After each token S takes the slot's precision, so that verify and decode agree.
Without the delta (Lightning) u is v itself, and q and k stay as they are.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from suite.errors import InputError
from suite.kernels.ops.interpreter import INTERPRETED

NORM_EPS = tl.constexpr(1e-6)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepInputs:
    """q, k: [tokens, k_heads, K], v: [tokens, v_heads, V], heads dense; g: log decay, fp32, [tokens, v_heads],
    [tokens, v_heads, K], or [v_heads] for a constant one; beta: [tokens, v_heads] fp32, or None without the delta."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor | None

    def __post_init__(self) -> None:
        tokens, v_heads, _ = self.v.shape
        k_heads, k_dim = self.k.shape[1:]
        if self.q.shape != self.k.shape or self.k.shape[0] != tokens or v_heads % k_heads:
            raise InputError("q, k, v", tuple(tuple(t.shape) for t in (self.q, self.k, self.v)), "one head layout")
        if self.g.shape not in ((tokens, v_heads), (tokens, v_heads, k_dim), (v_heads,)):
            raise InputError("g", tuple(self.g.shape), f"({tokens}, {v_heads}), with {k_dim}, or ({v_heads},)")
        if self.beta is not None and self.beta.shape != (tokens, v_heads):
            raise InputError("beta", tuple(self.beta.shape), f"({tokens}, {v_heads})")
        for name in ("q", "k", "v"):
            tensor = getattr(self, name)
            if tensor.stride(2) != 1 or tensor.stride(1) != tensor.shape[2]:
                raise InputError(f"{name}.stride", tensor.stride(), "dense heads and elements")

    @property
    def per_channel(self) -> bool:
        return self.g.ndim == 3


def normalised(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dim, fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def prepared(inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, k, g) in fp32 per value head: q scaled, both of unit length with the delta, g [tokens, v_heads, K or 1]."""
    q, k = inputs.q.float(), inputs.k.float()
    if inputs.beta is not None:
        q, k = normalised(q), normalised(k)
    tokens, v_heads, _ = inputs.v.shape
    q, k = (x.repeat_interleave(v_heads // k.shape[1], 1) for x in (q * q.shape[2] ** -0.5, k))
    g = inputs.g if inputs.per_channel else inputs.g.expand(tokens, v_heads)[..., None]
    return q, k, g


def delta_step(
    inputs: StepInputs,
    states: torch.Tensor,
    slots: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    scratch: torch.Tensor | None = None,
    scratch_rows: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the recurrence of every request from its slot; returns [tokens, v_heads, V] in v's dtype.

    states: [slots, v_heads, V, K], slots may stride. slots: [batch], negative: skipped, its outputs are 0.
    Without `scratch` the last state is written to its slot. With it ([rows, draft_tokens, v_heads, V, K],
    contiguous) no slot is written and the state after token j goes to `scratch[scratch_rows[r], j]`; `parents`
    [batch, draft_tokens] int32 then names the token each starts from, -1 for the slot. On CUDA one launch and no
    synchronisation.
    """
    if (scratch is None) != (scratch_rows is None) or (parents is not None and scratch is None):
        raise InputError("scratch", scratch, "scratch and its rows together, and with them alone a draft tree")
    step = delta_step_triton if states.is_cuda else delta_step_torch
    return step(inputs, states, slots, cu_query_lens, scratch=scratch, scratch_rows=scratch_rows, parents=parents)


def delta_step_torch(
    inputs: StepInputs,
    states: torch.Tensor,
    slots: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    scratch: torch.Tensor | None = None,
    scratch_rows: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in plain torch, for CPU tensors and for tests."""
    q, k, g = prepared(inputs)
    v, out = inputs.v.float(), torch.zeros_like(inputs.v)
    bounds = cu_query_lens.tolist()
    for request, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        begin, end = bounds[request], bounds[request + 1]
        known: list[torch.Tensor] = []
        state = states[slot].float()
        for t in range(begin, end):
            if parents is not None:
                parent = int(parents[request, t - begin])
                state = states[slot].float() if parent < 0 else known[parent]
            state = state * g[t, :, None].exp()
            written = v[t]
            if inputs.beta is not None:
                written = inputs.beta[t, :, None] * (written - (state @ k[t, :, :, None])[..., 0])
            state = state + written[..., None] * k[t, :, None]
            out[t] = (state @ q[t, :, :, None])[..., 0].to(out.dtype)
            state = state.to(states.dtype).float()
            known.append(state)
        if scratch is not None and scratch_rows is not None:
            scratch[int(scratch_rows[request]), : end - begin] = torch.stack(known).to(scratch.dtype)
        elif known:
            states[slot] = state.to(states.dtype)
    return out


def delta_step_triton(
    inputs: StepInputs,
    states: torch.Tensor,
    slots: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    scratch: torch.Tensor | None = None,
    scratch_rows: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same as one Triton launch."""
    q, k, v, g, beta = inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta
    _, v_heads, v_dim = v.shape
    k_heads, k_dim = k.shape[1:]
    # the interpreter truncates fp32 to bf16, torch rounds
    out = torch.empty(v.shape, dtype=torch.float32 if INTERPRETED else v.dtype, device=v.device)
    block_v = triton.next_power_of_2(v_dim)
    block_v = block_v if INTERPRETED else min(32, block_v)
    _delta_step_kernel[(triton.cdiv(v_dim, block_v), v_heads, slots.numel())](
        q,
        q.stride(0),
        k,
        k.stride(0),
        v,
        v.stride(0),
        g.contiguous(),
        beta if beta is None else beta.contiguous(),
        out,
        states,
        states.stride(0),
        slots,
        cu_query_lens,
        scratch,
        scratch_rows,
        0 if scratch is None else scratch.shape[1],
        parents,
        0 if parents is None else parents.stride(0),
        k_dim**-0.5,
        GROUP=v_heads // k_heads,
        V_HEADS=v_heads,
        K_DIM=k_dim,
        V_DIM=v_dim,
        G_PER_TOKEN=g.ndim > 1,
        G_PER_CHANNEL=inputs.per_channel,
        BLOCK_K=triton.next_power_of_2(k_dim),
        BLOCK_V=block_v,
        num_warps=4,
    )
    return out.to(v.dtype)


@triton.jit
def _delta_step_kernel(
    q,
    q_stride,
    k,
    k_stride,
    v,
    v_stride,
    g,
    beta,
    out,
    states,
    slot_stride,
    slots,
    cu_query_lens,
    scratch,
    scratch_rows,
    scratch_tokens,
    parents,
    parents_stride,
    scale,
    GROUP: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    G_PER_TOKEN: tl.constexpr,
    G_PER_CHANNEL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    head = tl.program_id(1)
    request = tl.program_id(2)
    begin = tl.load(cu_query_lens + request).to(tl.int64)
    end = tl.load(cu_query_lens + request + 1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    column = tl.arange(0, BLOCK_K)
    real_row, real_column = row < V_DIM, column < K_DIM
    real = real_row[:, None] & real_column[None, :]
    slot = tl.load(slots + request).to(tl.int64)
    if slot < 0:
        for token in range(begin, end):
            skipped = tl.zeros([BLOCK_V], out.dtype.element_ty)
            tl.store(out + (token * V_HEADS + head) * V_DIM + row, skipped, mask=real_row)
        return
    at_state = (head * V_DIM + row)[:, None] * K_DIM + column[None, :]
    held = states + slot * slot_stride + at_state  # slot * stride passes 2^31 in a large pool
    state = tl.load(held, mask=real, other=0.0).to(tl.float32)
    if scratch is not None:
        first = tl.load(scratch_rows + request).to(tl.int64) * scratch_tokens
    for token in range(begin, end):
        if parents is not None:
            parent = tl.load(parents + request * parents_stride + token - begin).to(tl.int64)
            if parent < 0:
                state = tl.load(held, mask=real, other=0.0).to(tl.float32)
            else:
                tl.debug_barrier()  # other threads of this program stored it
                node = scratch + (first + parent) * (V_HEADS * V_DIM * K_DIM) + at_state
                state = tl.load(node, mask=real, other=0.0).to(tl.float32)
        at_key = head // GROUP * K_DIM + column
        key = tl.load(k + token * k_stride + at_key, mask=real_column, other=0.0).to(tl.float32)
        query = tl.load(q + token * q_stride + at_key, mask=real_column, other=0.0).to(tl.float32)
        value = tl.load(v + token * v_stride + head * V_DIM + row, mask=real_row, other=0.0).to(tl.float32)
        at_gate = head
        if G_PER_TOKEN:
            at_gate = token * V_HEADS + head
        if G_PER_CHANNEL:
            decay = tl.exp(tl.load(g + at_gate * K_DIM + column, mask=real_column, other=0.0))
            state = state * decay[None, :]
        else:
            state = state * tl.exp(tl.load(g + at_gate))
        if beta is not None:
            key = key * tl.rsqrt(tl.sum(key * key, 0) + NORM_EPS)
            query = query * tl.rsqrt(tl.sum(query * query, 0) + NORM_EPS)
            strength = tl.load(beta + token * V_HEADS + head)
            value = strength * (value - tl.sum(state * key[None, :], 1))
        state += value[:, None] * key[None, :]
        read = tl.sum(state * (query * scale)[None, :], 1)
        tl.store(out + (token * V_HEADS + head) * V_DIM + row, read.to(out.dtype.element_ty), mask=real_row)
        state = state.to(states.dtype.element_ty).to(tl.float32)
        if scratch is not None:
            node = scratch + (first + token - begin) * (V_HEADS * V_DIM * K_DIM) + at_state
            tl.store(node, state.to(scratch.dtype.element_ty), mask=real)
    if scratch is None:
        tl.store(held, state.to(states.dtype.element_ty), mask=real)
