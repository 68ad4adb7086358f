"""Qwen3-Next and Qwen3.5: gated delta nets, and gated full attention in every fourth layer.

Norms are zero-centred: a checkpoint stores their distance from 1. Only the norm on a delta net's output is plain.
Text only: a vision checkpoint's language model is loaded, its vision tower is another runner's.
"""

from collections.abc import Collection

import torch
from torch import nn
from torch.nn import functional as F

from suite.kernels.geometry import AttentionLayer
from suite.kernels.linear.delta import DeltaInputs, DeltaLayer
from suite.models.causal import CausalModel, Turn
from suite.models.hooks import SharedExpertsApart
from suite.models.hybrid_config import QwenHybridConfig
from suite.models.layers import Linear, RMSNorm, Rotary, rotate
from suite.models.mixers import Mixers
from suite.models.routed import GatedMLP, RoutedExperts, Router
from suite.models.stored import stored_tensors

INNER_PREFIX = "model.language_model."  # of the language model inside a vision checkpoint
OTHER_RUNNERS = ("mtp.", "model.visual.")  # the draft's, the vision tower's


class GatedAttention(nn.Module):
    """Full attention whose output is gated: each head of q_proj gives its query, then its gate."""

    def __init__(self, config: QwenHybridConfig, index: int, **place) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.q_proj = Linear(hidden, 2 * config.q_heads * dim, bias=False, **place)
        self.k_proj = Linear(hidden, config.kv_heads * dim, bias=False, **place)
        self.v_proj = Linear(hidden, config.kv_heads * dim, bias=False, **place)
        self.o_proj = Linear(config.q_heads * dim, hidden, bias=False, **place)
        self.q_norm = RMSNorm(dim, config.norm_eps, place["device"], offset=1.0)
        self.k_norm = RMSNorm(dim, config.norm_eps, place["device"], offset=1.0)
        self.layer = AttentionLayer(
            index=index, q_heads=config.q_heads, kv_heads=config.kv_heads, head_dim=dim, scale=dim**-0.5
        )

    def forward(self, x: torch.Tensor, turn: Turn, mixers: Mixers) -> torch.Tensor:
        tokens, layer = len(x), self.layer
        q, gate = self.q_proj(x).view(tokens, layer.q_heads, -1).chunk(2, dim=-1)
        k = self.k_proj(x).view(tokens, layer.kv_heads, -1)
        v = self.v_proj(x).view(tokens, layer.kv_heads, -1)
        q, k = rotate(self.q_norm(q), *turn), rotate(self.k_norm(k), *turn)
        return self.o_proj((mixers.attend(layer, q, k, v) * gate.sigmoid()).flatten(1))


class Convolution(nn.Module):
    """weight: [channels, kernel]; checkpoints keep a channel dimension of 1 between the two."""

    def __init__(self, channels: int, kernel: int, **place) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, kernel, **place))

    def stored_as(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight[:, None]}


class GatedDeltaNet(nn.Module):
    """Projections around `Mixers.recur`; the output is normed per head and gated by silu(z)."""

    def __init__(self, config: QwenHybridConfig, index: int, **place) -> None:
        super().__init__()
        self.config = config
        hidden, wide = config.hidden_size, {"dtype": torch.float32, "device": place["device"]}
        keys, values = config.k_heads * config.k_dim, config.v_heads * config.v_dim
        if config.grouped:
            self.in_proj_qkvz = Linear(hidden, 2 * keys + 2 * values, bias=False, **place)
            self.in_proj_ba = Linear(hidden, 2 * config.v_heads, bias=False, **place)
        else:
            self.in_proj_qkv = Linear(hidden, 2 * keys + values, bias=False, **place)
            self.in_proj_z = Linear(hidden, values, bias=False, **place)
            self.in_proj_b = Linear(hidden, config.v_heads, bias=False, **place)
            self.in_proj_a = Linear(hidden, config.v_heads, bias=False, **place)
        self.conv1d = Convolution(2 * keys + values, config.conv_kernel, **place)
        self.A_log = nn.Parameter(torch.empty(config.v_heads, **wide))
        self.dt_bias = nn.Parameter(torch.empty(config.v_heads, **wide))
        self.norm = RMSNorm(config.v_dim, config.norm_eps, place["device"])
        self.out_proj = Linear(values, hidden, bias=False, **place)
        self.layer = DeltaLayer(
            index=index,
            k_heads=config.k_heads,
            v_heads=config.v_heads,
            k_dim=config.k_dim,
            v_dim=config.v_dim,
            conv_weight=self.conv1d.weight,  # the parameters themselves: loading and training write through them
            a_log=self.A_log,
            dt_bias=self.dt_bias,
        )

    def forward(self, x: torch.Tensor, turn: Turn, mixers: Mixers) -> torch.Tensor:
        inputs, z = self._project_grouped(x) if self.config.grouped else self._project(x)
        out = self.norm(mixers.recur(self.layer, inputs).float()) * F.silu(z.float())
        return self.out_proj(out.flatten(1).to(x.dtype))

    def _project(self, x: torch.Tensor) -> tuple[DeltaInputs, torch.Tensor]:
        z = self.in_proj_z(x).view(len(x), self.config.v_heads, -1)
        return DeltaInputs(mixed=self.in_proj_qkv(x), a=self.in_proj_a(x), b=self.in_proj_b(x)), z

    def _project_grouped(self, x: torch.Tensor) -> tuple[DeltaInputs, torch.Tensor]:
        """Every key head's group of rows is q | k | its values | their z, and b | a."""
        config, tokens = self.config, len(x)
        each = config.v_heads // config.k_heads
        widths = [config.k_dim, config.k_dim, each * config.v_dim, each * config.v_dim]
        q, k, v, z = self.in_proj_qkvz(x).view(tokens, config.k_heads, -1).split(widths, dim=-1)
        b, a = self.in_proj_ba(x).view(tokens, config.k_heads, -1).chunk(2, dim=-1)
        mixed = torch.cat([part.reshape(tokens, -1) for part in (q, k, v)], dim=1)
        inputs = DeltaInputs(mixed=mixed, a=a.reshape(tokens, -1), b=b.reshape(tokens, -1))
        return inputs, z.reshape(tokens, config.v_heads, -1)


class QwenMixtureOfExperts(nn.Module):
    """Routed experts, and a shared one whose share a gate decides token by token."""

    def __init__(self, config: QwenHybridConfig, **place) -> None:
        super().__init__()
        routing, hidden = config.routing, config.hidden_size
        self.gate = Router(routing, hidden, place["device"])
        self.experts = RoutedExperts(routing.experts, hidden, config.expert_size, **place)
        self.shared_expert = GatedMLP(hidden, config.shared_size, **place)
        self.shared_expert_gate = Linear(hidden, 1, bias=False, **place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return self.experts(x, *self.gate(x)) + shared


class DecoderLayer(nn.Module):
    """Pre-norm mixer and MLP, each added to the residual stream."""

    def __init__(self, config: QwenHybridConfig, index: int, **place) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, place["device"], offset=1.0)
        if config.linear[index]:
            self.linear_attn = GatedDeltaNet(config, index, **place)
            self.mixer = self.linear_attn.layer
        else:
            self.self_attn = GatedAttention(config, index, **place)
            self.mixer = self.self_attn.layer
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, place["device"], offset=1.0)
        self.mlp = (
            GatedMLP(config.hidden_size, config.mlp_size, **place)
            if config.routing is None
            else QwenMixtureOfExperts(config, **place)
        )

    def forward(self, x: torch.Tensor, turn: Turn, mixers: Mixers) -> torch.Tensor:
        mix = self.self_attn if isinstance(self.mixer, AttentionLayer) else self.linear_attn
        x = x + mix(self.input_layernorm(x), turn, mixers)
        return x + self.mlp(self.post_attention_layernorm(x))


class QwenHybrid(SharedExpertsApart, CausalModel):
    """The model. Norms, the decay's parameters and the router are fp32 in every dtype."""

    linear_family = "gdn"

    def __init__(self, config: QwenHybridConfig, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(
            config,
            [DecoderLayer(config, index, dtype=dtype, device=device) for index in range(config.layers)],
            RMSNorm(config.hidden_size, config.norm_eps, device, offset=1.0),
            Rotary(config.rope, config.rope.rotated(config.head_dim), config.max_positions, device),
            tied=config.tied,
            dtype=dtype,
            device=device,
        )

    def checkpoint_tensors(self, held: Collection[str]) -> dict[str, torch.Tensor]:
        """Vision checkpoints put a prefix before the language model's names; Qwen3.5 MoE is published with its
        experts stacked, Qwen3-Next with every expert apart."""
        stacked = any(name.endswith(".experts.gate_up_proj") for name in held)
        tensors = dict(self.named_parameters()) if stacked else stored_tensors(self)
        if stacked:
            tensors |= {name: tensor for name, tensor in stored_tensors(self).items() if name.endswith("conv1d.weight")}
        if any(name.startswith(INNER_PREFIX) for name in held):
            tensors = {name.replace("model.", INNER_PREFIX, 1): tensor for name, tensor in tensors.items()}
        return tensors

    @classmethod
    def other_runners_tensor(cls, name: str) -> bool:
        return name.startswith(OTHER_RUNNERS)
