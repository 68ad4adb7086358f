"""The gates of the delta rule: log decay and write strength from their projections, one launch.

g = -exp(a_log) * softplus(a + dt_bias)               (softplus is the identity above 20)
g = lower_bound * sigmoid(exp(a_log) * (a + dt_bias)) (KDA's safe gate: g never falls below it)
beta = sigmoid(b)
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from suite.errors import InputError

BLOCK = 1024
LINEAR_ABOVE = tl.constexpr(20.0)


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """g, shaped as a, and beta, shaped as b, both fp32.

    a: [tokens, v_heads] (GDN) or [tokens, v_heads, K] (KDA), dt_bias: its last dims, a_log: [v_heads],
    b: [tokens, v_heads]. Raises InputError for shapes that do not fit.
    """
    if a.shape[1:] != dt_bias.shape or a.shape[:2] != b.shape or a_log.shape != b.shape[1:]:
        shapes = tuple(tuple(tensor.shape) for tensor in (a, b, a_log, dt_bias))
        raise InputError("gates", shapes, "a [tokens, heads(, K)], b [tokens, heads], a_log [heads], dt_bias as a")
    compute = delta_gates_triton if a.is_cuda else delta_gates_torch
    return compute(a, b, a_log, dt_bias, lower_bound)


def delta_gates_torch(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain torch, for CPU tensors, tests and training."""
    rate = a_log.float().exp().view(-1, *[1] * (a.ndim - 2))
    shifted = a.float() + dt_bias.float()
    if lower_bound is None:
        g = -rate * F.softplus(shifted, threshold=20.0)
    else:
        g = lower_bound * torch.sigmoid(rate * shifted)
    return g, torch.sigmoid(b.float())


def delta_gates_triton(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as one Triton launch."""
    a, b = a.contiguous(), b.contiguous()
    g = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    beta = torch.empty(b.shape, dtype=torch.float32, device=b.device)
    if a.numel() == 0:
        return g, beta
    _delta_gates_kernel[(triton.cdiv(a.numel(), BLOCK),)](
        a,
        b,
        a_log.contiguous(),
        dt_bias.contiguous(),
        0.0 if lower_bound is None else lower_bound,
        g,
        beta,
        a.numel(),
        b.numel(),
        HEADS=a.shape[1],
        WIDTH=a[0, 0].numel(),
        SAFE=lower_bound is not None,
        BLOCK=BLOCK,
    )
    return g, beta


@triton.jit
def _delta_gates_kernel(
    a,
    b,
    a_log,
    dt_bias,
    lower_bound,
    g,
    beta,
    elements,
    strengths,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SAFE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    head = at // WIDTH % HEADS
    shifted = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    shifted += tl.load(dt_bias + at % (HEADS * WIDTH), mask=inside, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log + head, mask=inside, other=0.0).to(tl.float32))
    if SAFE:
        decay = lower_bound / (1.0 + tl.exp(-rate * shifted))
    else:
        # log(1 + e^x) as max(x, 0) + log1p(e^-|x|), and log1p corrected by what 1 + small rounds away
        small = tl.exp(-tl.abs(shifted))
        one_plus = 1.0 + small
        lost = one_plus == 1.0
        log1p = tl.where(lost, small, tl.log(one_plus) * small / tl.where(lost, 1.0, one_plus - 1.0))
        soft = tl.maximum(shifted, 0.0) + log1p
        decay = -rate * tl.where(shifted > LINEAR_ABOVE, shifted, soft)
    tl.store(g + at, decay, mask=inside)
    strong = at < strengths
    strength = tl.load(b + at, mask=strong, other=0.0).to(tl.float32)
    tl.store(beta + at, 1.0 / (1.0 + tl.exp(-strength)), mask=strong)
