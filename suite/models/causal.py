"""What every causal language model here has in common: embedding, decoder layers, final norm, logits.

A family adds its decoder layers. A layer is called as `layer(x, turn, mixers)` and names in `mixer` what it asks
its `Mixers` for: an attention layer, or a linear layer with recurrent state.
"""

from collections.abc import Collection, Iterable
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from suite.kernels.geometry import AttentionLayer
from suite.kernels.linear.delta import DeltaLayer
from suite.kernels.linear.lightning import LightningLayer
from suite.kernels.pools.state import StateGeometry
from suite.models.layers import Embedding, Linear
from suite.models.mixers import Mixers
from suite.models.stored import stored_tensors

Turn = tuple[torch.Tensor, torch.Tensor]  # cos and sin of this forward's positions, fp32 [tokens, 1, pairs]


class Turning(Protocol):
    """A rotary embedding's tables."""

    def at(self, positions: torch.Tensor) -> Turn:
        """Cos and sin at `positions` [tokens]."""


class CausalConfig(Protocol):
    """What the base reads of a family's configuration."""

    vocab_size: int
    hidden_size: int
    max_positions: int


class Decoder(nn.Module):
    """Embedding, layers, final norm: everything under the checkpoint's `model.` prefix."""

    def __init__(self, config: CausalConfig, layers: Iterable[nn.Module], norm: nn.Module, **place) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, **place)
        self.layers = nn.ModuleList(layers)
        self.norm = norm


class CausalModel(nn.Module):
    """Base of the families. Parameters are uninitialised until loaded.

    `tied`: the output projection is the embedding. `rotary` is None where positions are not rotated.
    """

    # which linear-attention backend advances the states of `linear_layers`; None without any
    linear_family: ClassVar[str | None] = None

    def __init__(
        self,
        config: Any,
        layers: Iterable[nn.Module],
        norm: nn.Module,
        rotary: Turning | None,
        *,
        tied: bool = False,
        dtype: torch.dtype,
        device: str | torch.device,
    ) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, layers, norm, dtype=dtype, device=device)
        self.lm_head = (
            None if tied else Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype, device=device)
        )
        self.rotary = rotary

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        """Those with rows to store, in order of their index."""
        return [layer.mixer for layer in self.model.layers if isinstance(layer.mixer, AttentionLayer)]

    @property
    def linear_layers(self) -> list[DeltaLayer | LightningLayer]:
        """Those with recurrent state, in order of their index."""
        return [layer.mixer for layer in self.model.layers if not isinstance(layer.mixer, AttentionLayer)]

    @property
    def max_positions(self) -> int:
        """How many positions the model can tell apart."""
        return self.config.max_positions

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    def state_geometry(self, dtype: torch.dtype, temporal_dtype: torch.dtype = torch.float32) -> StateGeometry | None:
        """What a request's state slot holds when activations are `dtype`; None without linear layers."""
        if not self.linear_layers:
            return None
        first, indices = self.linear_layers[0], tuple(layer.index for layer in self.linear_layers)
        if isinstance(first, LightningLayer):
            return StateGeometry(
                layers=indices,
                conv_dim=0,
                v_heads=first.heads,
                v_dim=first.head_dim,
                k_dim=first.head_dim,
                conv_dtype=dtype,
                temporal_dtype=temporal_dtype,
            )
        return StateGeometry(
            layers=indices,
            conv_dim=first.conv_dim,
            v_heads=first.v_heads,
            v_dim=first.v_dim,
            k_dim=first.k_dim,
            conv_width=first.conv_weight.shape[1] - 1,
            taps_first=self.linear_family == "kda",
            conv_dtype=dtype,
            temporal_dtype=temporal_dtype,
        )

    def checkpoint_tensors(self, held: Collection[str]) -> dict[str, torch.Tensor]:
        """Every tensor that a checkpoint of this model has, by its published name: a view of what it fills.

        `held`: the names in the checkpoint at hand, for families published in more than one layout. Together the
        views are all parameters.
        """
        return stored_tensors(self)

    @classmethod
    def other_runners_tensor(cls, name: str) -> bool:
        """Whether this tensor of a checkpoint belongs to another runner (a draft, a vision tower), not to this one."""
        return False

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, hidden]."""
        return self.model.embed_tokens(input_ids)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, mixers: Mixers) -> torch.Tensor:
        """input_ids, positions: int64 [tokens], all requests flattened -> final hidden states [tokens, hidden]."""
        turn = None if self.rotary is None else self.rotary.at(positions)
        x = self.embed(input_ids)
        for index, layer in enumerate(self.model.layers):
            x = layer(x, turn, mixers)
            mixers.after_layer(index, x)
        return self.model.norm(x)

    @property
    def output_weight(self) -> torch.Tensor:
        """[vocab, hidden]."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [n, hidden] -> fp32 [n, vocab], accumulated and kept in fp32 so that bf16 makes no ties."""
        weight = self.output_weight
        if hidden.is_cuda and hidden.dtype != torch.float32:
            return torch.mm(hidden, weight.T, out_dtype=torch.float32)
        return F.linear(hidden.float(), weight.float())
