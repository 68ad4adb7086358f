"""The gated delta rule over whole prompts, 64 tokens at a time.

Inside a chunk, with G the running sum of the log decay, what every token writes solves one triangular system:

    (I + L) U = diag(beta) (V - (K e^G) S^T),   L[t, j] = beta_t sum(k_t k_j e^(G_t - G_j)) for j < t
    O = (Q e^G) S^T + A U,                      A[t, j] = sum(q_t k_j e^(G_t - G_j)) for j <= t
    S <- S e^(G_last) + U^T (K e^(G_last - G))

so everything but the hand-over of S from chunk to chunk runs in parallel. Only differences of G that are 0 or
less are ever exponentiated. Five kernels: `delta_chunk_scores.py` and `delta_chunk_solve.py` have what needs no
state, `delta_chunk_scan.py` what does. Without the delta (Lightning) U is V. States are fp32 here; slots are
gathered before and scattered after.
"""

from dataclasses import dataclass

import torch

from suite.errors import InputError
from suite.kernels.ops.delta_chunk_scan import chunk_outputs, chunk_states
from suite.kernels.ops.delta_chunk_scores import chunk_local, chunk_scores
from suite.kernels.ops.delta_chunk_solve import chunk_solve
from suite.kernels.ops.delta_step import StepInputs, prepared
from suite.kernels.upload import upload

CHUNK = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkPlan:
    """How a batch falls into chunks, none of which crosses a request.

    firsts, lens: int32 [chunks], the first token of each chunk and its tokens. cu_chunks: int32 [batch + 1].
    """

    firsts: torch.Tensor
    lens: torch.Tensor
    cu_chunks: torch.Tensor
    query_lens_host: tuple[int, ...]
    cu_chunks_host: tuple[int, ...]

    @property
    def count(self) -> int:
        return self.cu_chunks_host[-1]

    @classmethod
    def create(cls, query_lens: tuple[int, ...], device: torch.device) -> "ChunkPlan":
        """The chunks of requests with `query_lens` new tokens, packed in order."""
        firsts, lens, counts, begin = [], [], [0], 0
        for length in query_lens:
            firsts += range(begin, begin + length, CHUNK)
            lens += [min(CHUNK, length - done) for done in range(0, length, CHUNK)]
            counts.append(len(firsts))
            begin += length
        packed = upload([*firsts, *lens, *counts], device).to(torch.int32)
        first, length, cu = packed.split([len(firsts), len(lens), len(counts)])
        return cls(
            firsts=first, lens=length, cu_chunks=cu, query_lens_host=tuple(query_lens), cu_chunks_host=tuple(counts)
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkResult:
    """out: [tokens, v_heads, V] in v's dtype. final: [batch, v_heads, V, K] fp32, the state after each request.

    boundaries: [chunks, v_heads, V, K] fp32, the state at the start of every chunk.
    """

    out: torch.Tensor
    final: torch.Tensor
    boundaries: torch.Tensor


def delta_chunk(inputs: StepInputs, initial: torch.Tensor, plan: ChunkPlan) -> ChunkResult:
    """Run every request from `initial` [batch, v_heads, V, K] fp32, contiguous.

    Raises InputError where tokens and plan disagree. On CUDA five launches (three without the delta) and no
    synchronisation.
    """
    tokens, batch = inputs.v.shape[0], len(plan.query_lens_host)
    if sum(plan.query_lens_host) != tokens:
        raise InputError("query_lens", sum(plan.query_lens_host), f"a sum of {tokens}, the new tokens")
    expected = (batch, *inputs.v.shape[1:], inputs.k.shape[2])
    if initial.shape != expected or initial.dtype != torch.float32 or not initial.is_contiguous():
        raise InputError("initial", (tuple(initial.shape), initial.dtype), f"{expected}, float32, contiguous")
    run = delta_chunk_triton if inputs.v.is_cuda else delta_chunk_torch
    return run(inputs, initial, plan)


def delta_chunk_torch(inputs: StepInputs, initial: torch.Tensor, plan: ChunkPlan) -> ChunkResult:
    """The same in plain torch: for CPU tensors, for tests, and differentiable for training."""
    q, k, g = prepared(inputs)
    v = inputs.v.float()
    outs, finals, boundaries, begin = [], [], [], 0
    for request, length in enumerate(plan.query_lens_host):
        state = initial[request]
        for first in range(begin, begin + length, CHUNK):
            mine = slice(first, min(first + CHUNK, begin + length))
            boundaries.append(state)
            beta = None if inputs.beta is None else inputs.beta[mine]
            out, state = _one_chunk(q[mine], k[mine], v[mine], g[mine], beta, state)
            outs.append(out)
        finals.append(state)
        begin += length
    return ChunkResult(
        out=torch.cat(outs).to(inputs.v.dtype), final=torch.stack(finals), boundaries=torch.stack(boundaries)
    )


def _one_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk of one request: q, k [C, heads, K], v [C, heads, V], g [C, heads, K or 1], state [heads, V, K]."""
    q, k, v, total = (x.transpose(0, 1) for x in (q, k, v, g.cumsum(0)))  # heads first
    apart = (total[:, :, None] - total[:, None]).masked_fill(_later(q.shape[1], q.device), -torch.inf).exp()
    reads = _pair_sums(q, k, apart)
    written = v
    if beta is not None:
        strength = beta.T[..., None]
        system = (strength * _pair_sums(k, k, apart)).tril(-1)
        known = (k * total.exp()) @ state.transpose(1, 2)
        written = torch.linalg.solve_triangular(system, strength * (v - known), upper=False, unitriangular=True)
    out = (q * total.exp()) @ state.transpose(1, 2) + reads @ written
    last = total[:, -1:]
    state = state * last.exp() + written.transpose(1, 2) @ (k * (last - total).exp())
    return out.transpose(0, 1), state


def _later(tokens: int, device: torch.device) -> torch.Tensor:
    """[tokens, tokens, 1] bool: the second comes after the first."""
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)[..., None]


def _pair_sums(x: torch.Tensor, y: torch.Tensor, apart: torch.Tensor) -> torch.Tensor:
    """[heads, C, C]: sum(x_t y_j apart_tj) over the key channels; apart [heads, C, C, K or 1]."""
    if apart.shape[3] == 1:
        return x @ y.transpose(1, 2) * apart[..., 0]
    return torch.einsum("htk,htjk,hjk->htj", x, apart, y)


def delta_chunk_triton(inputs: StepInputs, initial: torch.Tensor, plan: ChunkPlan) -> ChunkResult:
    """The same as five Triton launches."""
    local = chunk_local(inputs, plan)
    reads, system = chunk_scores(inputs, local, plan)
    if inputs.beta is None:
        seen, written = None, inputs.v.float().contiguous()
    else:
        assert system is not None
        seen, written = chunk_solve(inputs, local, system, plan)
    final, boundaries = chunk_states(inputs, local, seen, written, initial, plan)
    out = chunk_outputs(inputs, local, reads, written, boundaries, plan)
    return ChunkResult(out=out, final=final, boundaries=boundaries)
