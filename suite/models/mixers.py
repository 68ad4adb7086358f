"""What a model asks of whoever runs it: everything that touches stored rows or recurrent states.

A model knows nothing of pools, pages, slots or backends. It projects, rotates and normalises; a `Mixers` stores
what is to be kept and mixes tokens with what was kept before. The engine's reads and writes pools, the dense one
of training (`dense.py`) has no pool at all.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from suite.kernels.geometry import AttentionLayer

if TYPE_CHECKING:
    from suite.kernels.linear.delta import DeltaInputs, DeltaLayer
    from suite.kernels.linear.lightning import LightningInputs, LightningLayer

    LinearLayer = DeltaLayer | LightningLayer
    LinearInputs = DeltaInputs | LightningInputs

# latent rows [tokens, latent + rope] -> keys [tokens, heads, qk_dim], values [tokens, heads, v_dim]
Expand = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Mixers(Protocol):
    """One forward's token mixers. Every layer calls exactly one of `attend`, `attend_expanded`, `recur`."""

    expands_latent: bool  # whether latent layers are asked by `attend_expanded` instead of `attend`

    def attend(self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> torch.Tensor:
        """Store k and v [tokens, kv_heads, head_dim], attend q [tokens, q_heads, head_dim] to all that is visible.

        q and k are rotated. v is None for a latent layer, whose rows k hold both. Where the layer has sinks, the
        denominator includes exp(sink) of each head. Returns [tokens, q_heads, out_dim] in q's dtype.
        """

    def attend_expanded(
        self, layer: AttentionLayer, q: torch.Tensor, rows: torch.Tensor, expand: Expand, scale: float
    ) -> torch.Tensor:
        """Store latent rows [tokens, latent + rope], attend q [tokens, heads, qk_dim] to their expanded keys.

        Equals absorbed attention up to rounding. Returns [tokens, heads, v_dim] in q's dtype.
        """

    def store(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v [tokens, kv_heads, head_dim] without attending: rows that a draft is fed."""

    def recur(self, layer: "LinearLayer", inputs: "LinearInputs") -> torch.Tensor:
        """Advance the recurrent state of every request; returns [tokens, v_heads, v_dim] in the inputs' dtype."""

    def after_layer(self, index: int, residual: torch.Tensor) -> None:
        """Told the residual stream [tokens, hidden] after every decoder layer: the features that drafts are fed."""
