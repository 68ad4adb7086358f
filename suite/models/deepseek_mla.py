"""DeepSeek V2 and V3: multi-head latent attention and a mixture of experts with shared ones.

A stored row is one latent for all heads and one rotary key. Attention has two equal forms: absorbed, where the
up-projections move to the query and to the output and every head reads the latent itself, and expanded, where
the rows become keys and values of every head. Whoever runs the model says which, by its `Mixers`.
"""

import torch
from torch import nn

from suite.kernels.geometry import AttentionLayer
from suite.models.causal import CausalModel, Turn
from suite.models.hooks import SharedExpertsApart
from suite.models.layers import Linear, RMSNorm, Rotary, rotate
from suite.models.mixers import Mixers
from suite.models.mla_config import DeepseekConfig, LatentShape
from suite.models.routed import GatedMLP, SharedMixtureOfExperts

LATENT_EPS = 1e-6  # of the norms on the ranks, whatever the model's own


class LatentAttention(nn.Module):
    """Projections around `Mixers.attend` (absorbed) or `Mixers.attend_expanded`."""

    def __init__(self, shape: LatentShape, hidden: int, index: int, **place) -> None:
        super().__init__()
        self.shape, q_size = shape, shape.heads * shape.q_dim
        if shape.q_rank is None:
            self.q_proj = Linear(hidden, q_size, bias=False, **place)
        else:
            self.q_a_proj = Linear(hidden, shape.q_rank, bias=False, **place)
            self.q_a_layernorm = RMSNorm(shape.q_rank, LATENT_EPS, place["device"])
            self.q_b_proj = Linear(shape.q_rank, q_size, bias=False, **place)
        self.kv_a_proj_with_mqa = Linear(hidden, shape.row_dim, bias=False, **place)
        self.kv_a_layernorm = RMSNorm(shape.latent_dim, LATENT_EPS, place["device"])
        self.kv_b_proj = Linear(shape.latent_dim, shape.heads * (shape.nope_dim + shape.v_dim), bias=False, **place)
        self.o_proj = Linear(shape.heads * shape.v_dim, hidden, bias=False, **place)
        self.layer = AttentionLayer(
            index=index,
            q_heads=shape.heads,
            kv_heads=1,
            head_dim=shape.row_dim,
            scale=shape.scale,
            v_head_dim=shape.latent_dim,
            is_latent=True,
        )

    def forward(self, x: torch.Tensor, turn: Turn | None, mixers: Mixers) -> torch.Tensor:
        shape = self.shape
        q_nope, q_rope = self._query(x).split([shape.nope_dim, shape.rope_dim], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([shape.latent_dim, shape.rope_dim], dim=-1)
        q_rope, k_rope = self._turned(q_rope, turn), self._turned(k_rope[:, None], turn)[:, 0]
        rows = torch.cat((self.kv_a_layernorm(latent), k_rope), dim=-1)
        if mixers.expands_latent:
            q = torch.cat((q_nope, q_rope), dim=-1)
            out = mixers.attend_expanded(self.layer, q, rows, self.expand, shape.scale)
        else:
            up_k, up_v = self._up_projections()
            absorbed = torch.einsum("thn,hnl->thl", q_nope, up_k)
            mixed = mixers.attend(self.layer, torch.cat((absorbed, q_rope), dim=-1), rows[:, None], None)
            out = torch.einsum("thl,hvl->thv", mixed, up_v)
        return self.o_proj(out.flatten(1))

    def expand(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stored rows [tokens, latent + rope] -> keys [tokens, heads, nope + rope], values [tokens, heads, v_dim]."""
        shape = self.shape
        latent, k_rope = rows.split([shape.latent_dim, shape.rope_dim], dim=-1)
        k_nope, values = (
            self.kv_b_proj(latent).unflatten(-1, (shape.heads, -1)).split([shape.nope_dim, shape.v_dim], -1)
        )
        return torch.cat((k_nope, k_rope[:, None].expand(-1, shape.heads, -1)), dim=-1), values

    def _query(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, nope + rope]."""
        q = self.q_proj(x) if self.shape.q_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        return q.unflatten(-1, (self.shape.heads, -1))

    def _turned(self, x: torch.Tensor, turn: Turn | None) -> torch.Tensor:
        if turn is None:
            return x
        if self.shape.interleaved:
            # queries and keys are permuted alike, so no score changes
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotate(x, *turn)

    def _up_projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the up-projection: keys [heads, nope_dim, latent], values [heads, v_dim, latent]."""
        weight = self.kv_b_proj.weight.unflatten(0, (self.shape.heads, -1))
        up_k, up_v = weight.split([self.shape.nope_dim, self.shape.v_dim], dim=1)
        return up_k, up_v


class DecoderLayer(nn.Module):
    """Pre-norm latent attention and an MLP or a mixture of experts, each added to the residual stream."""

    def __init__(self, config: DeepseekConfig, index: int, **place) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.input_layernorm = RMSNorm(hidden, config.norm_eps, place["device"])
        self.self_attn = LatentAttention(config.attention, hidden, index, **place)
        self.post_attention_layernorm = RMSNorm(hidden, config.norm_eps, place["device"])
        self.mlp = (
            GatedMLP(hidden, config.dense_size, **place)
            if index < config.dense_layers
            else SharedMixtureOfExperts(config.routing, hidden, config.expert_size, config.shared_size, **place)
        )
        self.mixer = self.self_attn.layer

    def forward(self, x: torch.Tensor, turn: Turn | None, mixers: Mixers) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turn, mixers)
        return x + self.mlp(self.post_attention_layernorm(x))


class DeepseekMla(SharedExpertsApart, CausalModel):
    """The model. Norms and routers are fp32 in every dtype."""

    def __init__(self, config: DeepseekConfig, *, dtype: torch.dtype, device: str | torch.device) -> None:
        layers = [DecoderLayer(config, index, dtype=dtype, device=device) for index in range(config.layers)]
        norm = RMSNorm(config.hidden_size, config.norm_eps, device)
        rotary = Rotary(config.rope, config.attention.rope_dim, config.max_positions, device)
        super().__init__(config, layers, norm, rotary, dtype=dtype, device=device)

    def other_runners_tensor(self, name: str) -> bool:
        """The checkpoint's own draft is numbered after the model's layers."""
        first = self.config.layers
        return name.startswith(tuple(f"model.layers.{first + index}." for index in range(self.config.draft_layers)))
