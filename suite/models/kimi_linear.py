"""Kimi-Linear: Kimi delta attention in most layers, latent attention without rotation in some, many experts.

Order comes from the recurrent layers alone. Parameter names are those of the published checkpoint, which keeps
what is one product here (q, k and v, and their convolutions) in three tensors each.
"""

from typing import ClassVar

import torch
from torch import nn

from suite.kernels.linear.delta import DeltaInputs, DeltaLayer
from suite.models.causal import CausalModel, Turn
from suite.models.deepseek_mla import LatentAttention
from suite.models.hooks import SharedExpertsApart
from suite.models.kimi_config import DeltaShape, KimiLinearConfig
from suite.models.layers import Linear, RMSNorm
from suite.models.mixers import Mixers
from suite.models.routed import GatedMLP, SharedMixtureOfExperts

GATE_UP_DOWN = ("w1", "w3", "w2")


class DeltaAttention(nn.Module):
    """Projections around `Mixers.recur`: a decay per channel, a write strength per head, a gated output norm.

    qkv: [3 * size, hidden]; conv: [3 * size, kernel], channels q | k | v.
    """

    def __init__(self, shape: DeltaShape, hidden: int, norm_eps: float, index: int, **place) -> None:
        super().__init__()
        wide = {"dtype": torch.float32, "device": place["device"]}
        self.shape = shape
        self.qkv = nn.Parameter(torch.empty(3 * shape.size, hidden, **place))
        self.conv = nn.Parameter(torch.empty(3 * shape.size, shape.kernel, **place))
        self.A_log = nn.Parameter(torch.empty(shape.heads, **wide))
        self.dt_bias = nn.Parameter(torch.empty(shape.heads, shape.head_dim, **wide))
        self.f_a_proj = Linear(hidden, shape.head_dim, bias=False, **place)
        self.f_b_proj = Linear(shape.head_dim, shape.size, bias=False, **place)
        self.b_proj = Linear(hidden, shape.heads, bias=False, **place)
        self.g_a_proj = Linear(hidden, shape.head_dim, bias=False, **place)
        self.g_b_proj = Linear(shape.head_dim, shape.size, bias=False, **place)
        self.o_norm = RMSNorm(shape.head_dim, norm_eps, place["device"])
        self.o_proj = Linear(shape.size, hidden, bias=False, **place)
        self.layer = DeltaLayer(
            index=index,
            k_heads=shape.heads,
            v_heads=shape.heads,
            k_dim=shape.head_dim,
            v_dim=shape.head_dim,
            conv_weight=self.conv,  # the parameters themselves: loading and training write through them
            a_log=self.A_log,
            dt_bias=self.dt_bias,
        )

    def stored_as(self) -> dict[str, torch.Tensor]:
        """Published apart, convolutions with a channel axis, decay rates as a broadcast."""
        found = {"A_log": self.A_log.view(1, 1, -1, 1), "dt_bias": self.dt_bias.view(-1)}
        for name, weight, taps in zip("qkv", self.qkv.chunk(3), self.conv.chunk(3), strict=True):
            found[f"{name}_proj.weight"], found[f"{name}_conv1d.weight"] = weight, taps.unsqueeze(1)
        return found

    def forward(self, x: torch.Tensor, mixers: Mixers) -> torch.Tensor:
        heads = (self.shape.heads, self.shape.head_dim)
        decay = self.f_b_proj(self.f_a_proj(x)).unflatten(-1, heads)
        inputs = DeltaInputs(mixed=nn.functional.linear(x, self.qkv), a=decay, b=self.b_proj(x))
        out = self.o_norm(mixers.recur(self.layer, inputs).float())  # gated before it is rounded
        gate = self.g_b_proj(self.g_a_proj(x)).float().sigmoid().unflatten(-1, heads)
        return self.o_proj((out * gate).to(x.dtype).flatten(1))


class DecoderLayer(nn.Module):
    """Pre-norm mixing of tokens and an MLP or a mixture of experts, each added to the residual stream."""

    def __init__(self, config: KimiLinearConfig, index: int, **place) -> None:
        super().__init__()
        hidden, self.attends = config.hidden_size, config.attends[index]
        self.input_layernorm = RMSNorm(hidden, config.norm_eps, place["device"])
        self.self_attn = (
            LatentAttention(config.attention, hidden, index, **place)
            if self.attends
            else DeltaAttention(config.delta, hidden, config.norm_eps, index, **place)
        )
        self.post_attention_layernorm = RMSNorm(hidden, config.norm_eps, place["device"])
        if config.sparse[index]:
            self.block_sparse_moe = SharedMixtureOfExperts(
                config.routing, hidden, config.expert_size, config.shared_size, GATE_UP_DOWN, **place
            )
        else:
            self.mlp = GatedMLP(hidden, config.dense_size, **place)
        self.mixer = self.self_attn.layer

    def forward(self, x: torch.Tensor, turn: Turn | None, mixers: Mixers) -> torch.Tensor:
        normed = self.input_layernorm(x)
        x = x + (self.self_attn(normed, turn, mixers) if self.attends else self.self_attn(normed, mixers))
        feed_forward = self.mlp if hasattr(self, "mlp") else self.block_sparse_moe
        return x + feed_forward(self.post_attention_layernorm(x))


class KimiLinear(SharedExpertsApart, CausalModel):
    """The model. Norms, routers, decay rates and their biases are fp32 in every dtype."""

    linear_family: ClassVar[str | None] = "kda"

    def __init__(self, config: KimiLinearConfig, *, dtype: torch.dtype, device: str | torch.device) -> None:
        layers = [DecoderLayer(config, index, dtype=dtype, device=device) for index in range(len(config.attends))]
        norm = RMSNorm(config.hidden_size, config.norm_eps, device)
        super().__init__(config, layers, norm, None, dtype=dtype, device=device)
