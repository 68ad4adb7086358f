"""Dense decoders: Qwen3, whose queries and keys are normed per head, and Llama, whose are not."""

import torch
from torch import nn

from suite.kernels.geometry import AttentionLayer
from suite.models.causal import CausalModel, Turn
from suite.models.dense_config import DenseConfig
from suite.models.layers import Linear, RMSNorm, Rotary, rotate
from suite.models.mixers import Mixers
from suite.models.routed import GatedMLP


class Attention(nn.Module):
    """Projections without bias around `Mixers.attend`."""

    def __init__(self, config: DenseConfig, index: int, **place) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.q_proj = Linear(hidden, config.q_heads * dim, bias=False, **place)
        self.k_proj = Linear(hidden, config.kv_heads * dim, bias=False, **place)
        self.v_proj = Linear(hidden, config.kv_heads * dim, bias=False, **place)
        self.o_proj = Linear(config.q_heads * dim, hidden, bias=False, **place)
        self.normed = config.qk_norm
        if self.normed:
            self.q_norm = RMSNorm(dim, config.norm_eps, place["device"])
            self.k_norm = RMSNorm(dim, config.norm_eps, place["device"])
        self.layer = AttentionLayer(
            index=index, q_heads=config.q_heads, kv_heads=config.kv_heads, head_dim=dim, scale=dim**-0.5
        )

    def forward(self, x: torch.Tensor, turn: Turn, mixers: Mixers) -> torch.Tensor:
        tokens, layer = len(x), self.layer
        q = self.q_proj(x).view(tokens, layer.q_heads, -1)
        k = self.k_proj(x).view(tokens, layer.kv_heads, -1)
        v = self.v_proj(x).view(tokens, layer.kv_heads, -1)
        if self.normed:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.o_proj(mixers.attend(layer, rotate(q, *turn), rotate(k, *turn), v).flatten(1))


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: DenseConfig, index: int, **place) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, place["device"])
        self.self_attn = Attention(config, index, **place)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, place["device"])
        self.mlp = GatedMLP(config.hidden_size, config.mlp_size, **place)
        self.mixer = self.self_attn.layer

    def forward(self, x: torch.Tensor, turn: Turn, mixers: Mixers) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turn, mixers)
        return x + self.mlp(self.post_attention_layernorm(x))


class DenseDecoder(CausalModel):
    """The model. Norms are fp32 in every dtype."""

    def __init__(self, config: DenseConfig, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(
            config,
            [DecoderLayer(config, index, dtype=dtype, device=device) for index in range(config.layers)],
            RMSNorm(config.hidden_size, config.norm_eps, device),
            Rotary(config.rope, config.rope.rotated(config.head_dim), config.max_positions, device),
            tied=config.tied,
            dtype=dtype,
            device=device,
        )
