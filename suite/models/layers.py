"""The parts that decoder models share: linear, RMS norm, rotary embedding.

Parameters are allocated, not initialised: the loader or a training script fills
every one of them. Norms and rotary embeddings compute in fp32 whatever the
model's dtype.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from suite.models.config import Rope


class Linear(nn.Module):
    """`x @ weight.T + bias`. weight: [outputs, inputs]; bias: [outputs]."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, **place) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, **place))
        self.bias = nn.Parameter(torch.empty(outputs, **place)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """weight: [vocab, hidden]."""

    def __init__(self, vocab: int, hidden: int, **place) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden, **place))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class RMSNorm(nn.Module):
    """`x / rms(x) * (weight + offset)` over the last axis, computed in fp32 with an fp32 weight, in x's dtype.

    offset: 1 where the checkpoint stores the weight's distance from 1.
    """

    def __init__(self, size: int, eps: float, device: torch.device | str, *, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * (self.weight + self.offset)).to(x.dtype)


def rope_frequencies(rope: Rope, dim: int) -> tuple[torch.Tensor, float]:
    """Angle per position of each rotary pair, fp32 [dim / 2], and the factor on cos and sin.

    YaRN: pairs that turn more than `beta_fast` times over the original context keep their frequency, those
    that turn less than `beta_slow` times have it divided by `factor`, a linear ramp joins the two.
    """
    exact = rope.theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.factor == 1.0:
        return exact, 1.0

    def pair_turning(times: float) -> float:
        return dim * math.log(rope.original_positions / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)
    stretched = ramp.clamp(0, 1)
    frequencies = exact / rope.factor * stretched + exact * (1 - stretched)
    return frequencies, 0.1 * math.log(rope.factor) + 1.0 if rope.amplitude is None else rope.amplitude


class Rotary(nn.Module):
    """Rotates pairs (i, i + dim/2) of each head by the token's position. Tables: fp32 [max_positions, dim / 2]."""

    def __init__(self, rope: Rope, dim: int, max_positions: int, device: torch.device | str) -> None:
        super().__init__()
        frequencies, scale = rope_frequencies(rope, dim)
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
        self.register_buffer("cos", (angles.cos() * scale).to(device), persistent=False)
        self.register_buffer("sin", (angles.sin() * scale).to(device), persistent=False)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of `positions` [tokens], fp32 [tokens, 1, dim / 2]."""
        return self.cos[positions][:, None], self.sin[positions][:, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [tokens, heads, dim], in its dtype; rotated in fp32, elements past the tables' width stay as they are."""
    turned = 2 * cos.shape[-1]
    first, second = x[..., :turned].float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return rotated if turned == x.shape[-1] else torch.cat((rotated, x[..., turned:]), dim=-1)
