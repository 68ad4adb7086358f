"""Ling-style hybrid of Lightning attention and full attention with a dense MLP in every layer.

The last layer of every group of `layer_group_size` attends, the others recur: linear attention whose decay is a
constant of head and layer. A recurrent layer's output is normed per group of heads and gated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from suite.errors import InputError
from suite.kernels.geometry import AttentionLayer
from suite.kernels.linear.lightning import LightningInputs, LightningLayer
from suite.models.causal import CausalModel, Turn
from suite.models.config import BOOKKEEPING, Fields, Rope
from suite.models.layers import Linear, RMSNorm, Rotary, rotate
from suite.models.mixers import Mixers
from suite.models.routed import GatedMLP


@dataclass(frozen=True, kw_only=True)
class LightningHybridConfig:
    """attends: per layer, full attention instead of Lightning. norm_groups: of a recurrent layer's heads."""

    vocab_size: int
    hidden_size: int
    attends: tuple[bool, ...]
    q_heads: int
    kv_heads: int
    head_dim: int
    norm_groups: int
    mlp_size: int
    norm_eps: float
    rope: Rope
    max_positions: int

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "LightningHybridConfig":
        """From the object in `config.json`. Raises InputError naming the first field that is missing or bad."""
        fields = Fields(values)
        fields.only("hidden_act", "silu", "silu")
        fields.only("use_qkv_bias", False, False)
        fields.only("use_bias", False, False)
        fields.only("tie_word_embeddings", False, False)
        fields.only("use_qk_norm", True, True)
        layers, group = fields.count("num_hidden_layers"), fields.count("layer_group_size")
        config = cls(
            vocab_size=fields.count("vocab_size"),
            hidden_size=fields.count("hidden_size"),
            attends=tuple((index + 1) % group == 0 for index in range(layers)),
            q_heads=fields.count("num_attention_heads"),
            kv_heads=fields.count("num_key_value_heads"),
            head_dim=fields.count("head_dim"),
            norm_groups=fields.count("group_norm_size"),
            mlp_size=fields.count("intermediate_size"),
            norm_eps=fields.number("rms_norm_eps"),
            rope=Rope.read(fields),
            max_positions=fields.count("max_position_embeddings"),
        )
        fields.refuse_unread(BOOKKEEPING)
        if not any(config.attends):
            raise InputError("layer_group_size", group, f"at most num_hidden_layers ({layers}): one layer attends")
        for name, many, few in (
            ("num_attention_heads", config.q_heads, config.kv_heads),
            ("group_norm_size", config.q_heads, config.norm_groups),
        ):
            if many % few:
                raise InputError(
                    name, few if name == "group_norm_size" else many, f"so that {few} divides {many} heads"
                )
        config.rope.rotated(config.head_dim)
        return config


class Projections(nn.Module):
    """query_key_value and dense, named as published; queries and keys are normed per head and rotated."""

    def __init__(self, config: LightningHybridConfig, kv_heads: int, **place) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = config.q_heads, kv_heads, config.head_dim
        rows = (config.q_heads + 2 * kv_heads) * config.head_dim
        self.query_key_value = Linear(config.hidden_size, rows, bias=False, **place)
        self.dense = Linear(config.q_heads * config.head_dim, config.hidden_size, bias=False, **place)
        self.query_layernorm = RMSNorm(config.head_dim, config.norm_eps, place["device"])
        self.key_layernorm = RMSNorm(config.head_dim, config.norm_eps, place["device"])

    def project(self, x: torch.Tensor, turn: Turn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x: [tokens, hidden] -> q [tokens, heads, dim], k and v [tokens, kv_heads, dim]."""
        heads = self.query_key_value(x).unflatten(1, (-1, self.dim))
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        return rotate(self.query_layernorm(q), *turn), rotate(self.key_layernorm(k), *turn), v.contiguous()


class Attention(Projections):
    """Full attention."""

    def __init__(self, config: LightningHybridConfig, index: int, **place) -> None:
        super().__init__(config, config.kv_heads, **place)
        self.layer = AttentionLayer(
            index=index, q_heads=self.heads, kv_heads=self.kv_heads, head_dim=self.dim, scale=self.dim**-0.5
        )

    def forward(self, x: torch.Tensor, turn: Turn, mixers: Mixers) -> torch.Tensor:
        return self.dense(mixers.attend(self.layer, *self.project(x, turn)).flatten(1))


class GroupNorm(nn.Module):
    """RMS norm within each of `groups` equal groups of elements; weight: [elements]."""

    def __init__(self, elements: int, groups: int, eps: float, device: torch.device | str) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.empty(elements, dtype=torch.float32, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float().unflatten(1, (self.groups, -1))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).flatten(1) * self.weight


class LightningAttention(Projections):
    """Lightning attention: as many key as query heads, the output normed in groups and gated by sigmoid(g_proj x)."""

    def __init__(self, config: LightningHybridConfig, index: int, **place) -> None:
        super().__init__(config, config.q_heads, **place)
        size = config.q_heads * config.head_dim
        self.g_proj = Linear(config.hidden_size, size, bias=False, **place)
        self.g_norm = GroupNorm(size, config.norm_groups, config.norm_eps, place["device"])
        # decays come from the head's and the layer's number, so they are computed wherever the weights will lie
        self.layer = LightningLayer.of_model(
            index=index,
            layers=len(config.attends),
            heads=config.q_heads,
            head_dim=config.head_dim,
            device=place["device"],
        )

    def forward(self, x: torch.Tensor, turn: Turn, mixers: Mixers) -> torch.Tensor:
        q, k, v = self.project(x, turn)
        out = mixers.recur(self.layer, LightningInputs(q=q, k=k, v=v)).flatten(1)
        return self.dense((self.g_norm(out) * self.g_proj(x).float().sigmoid()).to(x.dtype))


class DecoderLayer(nn.Module):
    """Pre-norm mixer and MLP, each added to the residual stream."""

    def __init__(self, config: LightningHybridConfig, index: int, **place) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, place["device"])
        self.attention = (Attention if config.attends[index] else LightningAttention)(config, index, **place)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, place["device"])
        self.mlp = GatedMLP(config.hidden_size, config.mlp_size, **place)
        self.mixer = self.attention.layer

    def forward(self, x: torch.Tensor, turn: Turn, mixers: Mixers) -> torch.Tensor:
        x = x + self.attention(self.input_layernorm(x), turn, mixers)
        return x + self.mlp(self.post_attention_layernorm(x))


class LightningHybrid(CausalModel):
    """The model. Norms are fp32 in every dtype."""

    linear_family = "lightning"

    def __init__(self, config: LightningHybridConfig, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(
            config,
            [DecoderLayer(config, index, dtype=dtype, device=device) for index in range(len(config.attends))],
            RMSNorm(config.hidden_size, config.norm_eps, device),
            Rotary(config.rope, config.rope.rotated(config.head_dim), config.max_positions, device),
            dtype=dtype,
            device=device,
        )
