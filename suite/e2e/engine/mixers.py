"""The mixers of one forward over a runner's pools: attention backend, expanded MLA prefill, recurrent state."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from suite.errors import InvariantError
from suite.kernels.attention.base import AttentionBackend, Metadata
from suite.kernels.attention.mla_prefill import MlaPrefill
from suite.kernels.batch import ForwardBatch
from suite.kernels.geometry import AttentionLayer
from suite.kernels.linear.base import LinearBackend
from suite.kernels.linear.metadata import LinearMetadata
from suite.models.mixers import Expand

if TYPE_CHECKING:
    from suite.models.mixers import LinearInputs, LinearLayer


@dataclass(kw_only=True, eq=False)
class PooledMixers:
    """`linear` and its metadata are there for models with recurrent layers, `expanded` and its batch for a prefill of
    latent layers. `features` collects the residual stream after the layers that a draft is fed from."""

    backend: AttentionBackend
    metadata: Metadata
    linear: LinearBackend | None = None
    linear_metadata: LinearMetadata | None = None
    expanded: MlaPrefill | None = None
    batch: ForwardBatch | None = None
    expands_latent: bool = False
    feature_layers: Collection[int] = ()
    features: dict[int, torch.Tensor] = field(default_factory=dict)

    def attend(self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> torch.Tensor:
        return self.backend.forward(layer, q, k, v, self.metadata)

    def attend_expanded(
        self, layer: AttentionLayer, q: torch.Tensor, rows: torch.Tensor, expand: Expand, scale: float
    ) -> torch.Tensor:
        if self.expanded is None or self.batch is None:
            raise InvariantError(f"layer {layer.index}: attend_expanded in a forward that does not expand")
        return self.expanded.forward(layer.index, self.batch, q, rows, scale, expand)

    def store(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor) -> None:
        self.backend.pool.write(layer.index, self.metadata.write_ids_of(layer.kind), k, v)

    def recur(self, layer: "LinearLayer", inputs: "LinearInputs") -> torch.Tensor:
        if self.linear is None or self.linear_metadata is None:
            raise InvariantError(f"layer {layer.index}: this runner has no recurrent state")
        return self.linear.forward(layer, inputs, self.linear_metadata)

    def after_layer(self, index: int, residual: torch.Tensor) -> None:
        if index in self.feature_layers:
            self.features[index] = residual
