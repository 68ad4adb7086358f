"""The oracle of the linear-attention kernels: token by token, head by head, from the formulas alone.

Everything is computed in `dtype`: float64 says what is right, bfloat16 what the same maths would lose. No
function here knows slots, strides or chunks. Shapes are those of one request; a state is S [v_heads, V, K].
"""

import torch
import torch.nn.functional as F

NORM_EPS = 1e-6
SOFTPLUS_LINEAR_ABOVE = 20.0


def naive_conv(
    x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Depthwise causal convolution and SiLU of x [tokens, dim], weight [dim, width + 1].

    window: [dim, width], the inputs before x, oldest first. Returns (out [tokens, dim], the window after x);
    windows hold inputs, not outputs.
    """
    width, out = window.shape[1], []
    window, x, weight = window.to(dtype), x.to(dtype), weight.to(dtype)
    for token in x:
        taps = torch.cat([window, token[:, None]], 1)
        mixed = (taps * weight).sum(1)
        out.append(mixed * torch.sigmoid(mixed))
        window = taps[:, 1:]
    assert window.shape[1] == width
    return torch.stack(out), window


def naive_gates(
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay g, shaped as a, and beta, shaped as b.

    a: [tokens, v_heads] (GDN) or [tokens, v_heads, K] (KDA), dt_bias its last dims, a_log: [v_heads],
    b: [tokens, v_heads]. With `lower_bound` (KDA's safe gate) g stays above it.
    """
    a, b, a_log, dt_bias = (tensor.to(dtype) for tensor in (a, b, a_log, dt_bias))
    rate = a_log.exp().reshape(-1, *[1] * (a.ndim - 2))
    shifted = a + dt_bias
    if lower_bound is None:
        g = -rate * F.softplus(shifted, threshold=SOFTPLUS_LINEAR_ABOVE)
    else:
        g = lower_bound * torch.sigmoid(rate * shifted)
    return g, torch.sigmoid(b)


def unit(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dim."""
    return x / (x.square().sum(-1, keepdim=True) + NORM_EPS).sqrt()


def naive_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    parents: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The gated delta rule: decay, write what the state does not know yet, read.

    q, k: [tokens, k_heads, K], v: [tokens, v_heads, V], g: [tokens, v_heads] or [tokens, v_heads, K] log decay,
    beta: [tokens, v_heads]. Token t starts from the state after token `parents[t]` (-1: the given state;
    default: t - 1). Returns out [tokens, v_heads, V] and the state after every token.
    """
    q, k, v, g, beta, state = (tensor.to(dtype) for tensor in (q, k, v, g, beta, state))
    q, k = unit(q) * q.shape[2] ** -0.5, unit(k)
    group = v.shape[1] // k.shape[1]
    outs: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    for t in range(v.shape[0]):
        parent = t - 1 if parents is None else parents[t]
        before = state if parent < 0 else states[parent]
        after = []
        for head in range(v.shape[1]):
            key, query = k[t, head // group], q[t, head // group]
            decayed = before[head] * g[t, head].exp()
            written = beta[t, head] * (v[t, head] - decayed @ key)
            after.append(decayed + torch.outer(written, key))
            outs.append(after[head] @ query)
        states.append(torch.stack(after))
    return torch.stack(outs).view(v.shape), states


def naive_lightning(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rate: torch.Tensor,
    state: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Linear attention with a fixed decay per head: S <- S exp(-rate) + v k^T, o = head_dim^-1/2 S q.

    q, k, v: [tokens, heads, head_dim], rate: [heads]. Returns out [tokens, heads, head_dim] and the state
    after every token.
    """
    q, k, v, rate, state = (tensor.to(dtype) for tensor in (q, k, v, rate, state))
    outs: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    for t in range(v.shape[0]):
        after = []
        for head in range(v.shape[1]):
            after.append(state[head] * torch.exp(-rate[head]) + torch.outer(v[t, head], k[t, head]))
            outs.append(after[head] @ q[t, head] * q.shape[2] ** -0.5)
        state = torch.stack(after)
        states.append(state)
    return torch.stack(outs).view(v.shape), states
