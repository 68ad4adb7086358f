"""gpt-oss: decoder with alternating sliding-window and full attention, per-head sinks and an MoE.

Whoever runs it passes its `Mixers`. Parameter names are those of the Hugging Face checkpoint.
"""

import torch
from torch import nn

from suite.kernels.geometry import AttentionLayer
from suite.models.causal import CausalModel, Turn
from suite.models.config import GptOssConfig
from suite.models.layers import Linear, RMSNorm, Rotary, rotate
from suite.models.mixers import Mixers
from suite.models.moe import MixtureOfExperts


class Attention(nn.Module):
    """Projections around `Mixers.attend`."""

    def __init__(self, config: GptOssConfig, index: int, **place) -> None:
        super().__init__()
        hidden, q_size, kv_size = (
            config.hidden_size,
            config.q_heads * config.head_dim,
            config.kv_heads * config.head_dim,
        )
        self.q_proj = Linear(hidden, q_size, **place)
        self.k_proj = Linear(hidden, kv_size, **place)
        self.v_proj = Linear(hidden, kv_size, **place)
        self.o_proj = Linear(q_size, hidden, **place)
        self.sinks = nn.Parameter(torch.empty(config.q_heads, dtype=torch.float32, device=place["device"]))
        self.layer = AttentionLayer(
            index=index,
            q_heads=config.q_heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            window=config.windows[index],
            sinks=self.sinks,  # the parameter itself: loading and training write through it
        )

    def forward(self, x: torch.Tensor, turn: Turn, mixers: Mixers) -> torch.Tensor:
        tokens, layer = len(x), self.layer
        q = rotate(self.q_proj(x).view(tokens, layer.q_heads, layer.head_dim), *turn)
        k = rotate(self.k_proj(x).view(tokens, layer.kv_heads, layer.head_dim), *turn)
        v = self.v_proj(x).view(tokens, layer.kv_heads, layer.head_dim)
        return self.o_proj(mixers.attend(layer, q, k, v).reshape(tokens, layer.q_heads * layer.head_dim))


class DecoderLayer(nn.Module):
    """Pre-norm attention and MoE, each added to the residual stream."""

    def __init__(self, config: GptOssConfig, index: int, **place) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, place["device"])
        self.self_attn = Attention(config, index, **place)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, place["device"])
        self.mlp = MixtureOfExperts(config, **place)
        self.mixer = self.self_attn.layer

    def forward(self, x: torch.Tensor, turn: Turn, mixers: Mixers) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turn, mixers)
        return x + self.mlp(self.post_attention_layernorm(x))


class GptOss(CausalModel):
    """The model. Norms and sinks are fp32 in every dtype."""

    def __init__(self, config: GptOssConfig, *, dtype: torch.dtype, device: str | torch.device) -> None:
        layers = [DecoderLayer(config, index, dtype=dtype, device=device) for index in range(config.layers)]
        norm = RMSNorm(config.hidden_size, config.norm_eps, device)
        rotary = Rotary(config.rope, config.head_dim, config.max_positions, device)
        super().__init__(config, layers, norm, rotary, dtype=dtype, device=device)
