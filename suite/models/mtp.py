"""NEXTN drafts: one more decoder layer of the target's family, fed the target's final hidden state and the next token.

Row p of the draft is made from the target's hidden state at p and the token at p + 1, stands at position p and, in a
runner that shares the target's slots, at the target's slot of p; its output predicts the token at p + 2. To draft
further, the draft's own output takes the place of the target's. Embedding and output projection are the target's.
"""

import dataclasses
from collections.abc import Collection
from typing import Any, ClassVar

import torch
from torch import nn

from suite.errors import InputError
from suite.kernels.geometry import AttentionLayer
from suite.models import deepseek_mla, qwen_hybrid
from suite.models.borrowing import BorrowingDraft
from suite.models.hooks import SharedExpertsApart
from suite.models.hybrid_config import QwenHybridConfig
from suite.models.layers import Linear, RMSNorm, Rotary
from suite.models.mixers import Mixers
from suite.models.mla_config import DeepseekConfig
from suite.models.stored import stored_tensors


class MtpDraft(SharedExpertsApart, BorrowingDraft):
    """Base of the families: `project([embed_norm(embedding) ; hidden_norm(hidden)])`, a decoder layer, a norm.

    Parameters are uninitialised until loaded; `borrow` a target before anything is drafted.
    """

    published: ClassVar[dict[str, str]]  # module here -> what checkpoints call it, below `prefix`
    prefix: str

    def __init__(self, config: Any, layer: nn.Module, norms: list[nn.Module], rotary: Rotary, **place) -> None:
        super().__init__(config)
        self.embed_norm, self.hidden_norm, self.norm = norms
        self.project = Linear(2 * config.hidden_size, config.hidden_size, bias=False, **place)
        self.layer, self.rotary = layer, rotary

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        return [self.layer.mixer]

    def forward(
        self, next_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, mixers: Mixers
    ) -> torch.Tensor:
        """next_ids, positions: int64 [tokens], hidden: [tokens, hidden] of the tokens before -> [tokens, hidden].

        hidden: the target's, final norm included, or this draft's own output. Stores the rows of `positions`.
        """
        embedded = self.embed_norm(self.embed(next_ids))
        x = self.project(torch.cat((embedded, self.hidden_norm(hidden)), dim=-1))
        return self.norm(self.layer(x, self.rotary.at(positions), mixers))

    def checkpoint_tensors(self, held: Collection[str]) -> dict[str, torch.Tensor]:
        """Experts lie apart or, in Qwen3.5's checkpoints, stacked."""
        stacked = any(name.startswith(self.prefix) and name.endswith(".experts.gate_up_proj") for name in held)
        tensors = dict(self.named_parameters()) if stacked else stored_tensors(self)
        return {self._published(name): tensor for name, tensor in tensors.items()}

    def other_runners_tensor(self, name: str) -> bool:
        """All but the draft's own; copies of what it borrows are not its own."""
        borrowed = (f"{self.prefix}embed_tokens.weight", f"{self.prefix}shared_head.head.weight")
        return not name.startswith(self.prefix) or name in borrowed

    def _published(self, name: str) -> str:
        module, _, rest = name.partition(".")
        return self.prefix + (f"{self.published[module]}.{rest}" if self.published[module] else rest)


class DeepseekMtp(MtpDraft):
    """DeepSeek V3's, numbered as the layer after its target's last."""

    published: ClassVar[dict[str, str]] = {
        "embed_norm": "enorm",
        "hidden_norm": "hnorm",
        "project": "eh_proj",
        "layer": "",
        "norm": "shared_head.norm",
    }

    def __init__(self, config: DeepseekConfig, *, dtype: torch.dtype, device: str | torch.device) -> None:
        if config.draft_layers != 1:
            raise InputError("num_nextn_predict_layers", config.draft_layers, "1, the only number implemented")
        self.prefix = f"model.layers.{config.layers}."
        super().__init__(
            config,
            deepseek_mla.DecoderLayer(config, config.layers, dtype=dtype, device=device),
            [RMSNorm(config.hidden_size, config.norm_eps, device) for _ in range(3)],
            Rotary(config.rope, config.attention.rope_dim, config.max_positions, device),
            dtype=dtype,
            device=device,
        )


class QwenMtp(MtpDraft):
    """Qwen3-Next's and Qwen3.5's: a full-attention layer, whatever the target's layers alternate with."""

    prefix = "mtp."
    published: ClassVar[dict[str, str]] = {
        "embed_norm": "pre_fc_norm_embedding",
        "hidden_norm": "pre_fc_norm_hidden",
        "project": "fc",
        "layer": "layers.0",
        "norm": "norm",
    }

    def __init__(self, config: QwenHybridConfig, *, dtype: torch.dtype, device: str | torch.device) -> None:
        alone = dataclasses.replace(config, linear=(False,))
        super().__init__(
            config,
            qwen_hybrid.DecoderLayer(alone, 0, dtype=dtype, device=device),
            [RMSNorm(config.hidden_size, config.norm_eps, device, offset=1.0) for _ in range(3)],
            Rotary(config.rope, config.rope.rotated(config.head_dim), config.max_positions, device),
            dtype=dtype,
            device=device,
        )
