"""Lightning attention: linear attention whose decay is a constant of head and layer; no convolution, no gates."""

import math
from dataclasses import dataclass

import torch

from suite.errors import InputError
from suite.kernels.linear.base import LinearBackend
from suite.kernels.linear.metadata import LinearMetadata
from suite.kernels.linear.stamp import LinearAttnBackends
from suite.kernels.ops.delta_step import StepInputs
from suite.kernels.pools.state import StateGeometry
from suite.records import Launcher


def alibi_slopes(heads: int) -> list[float]:
    """One slope per head: powers of r = 2^(-8 / heads) where heads is a power of two.

    Otherwise those of the power of two below, then every other one of twice as many heads.
    """
    if heads < 1:
        raise InputError("heads", heads, "a positive number")
    power = 2 ** int(math.log2(heads))
    root = 2.0 ** -(2.0 ** -(math.log2(power) - 3))
    slopes = [root ** (i + 1) for i in range(power)]
    return slopes if power == heads else slopes + alibi_slopes(2 * power)[0::2][: heads - power]


def layer_factor(layer: int, layers: int, *, layerwise: bool = True) -> float:
    """How much of its slope layer `layer` of `layers` decays by: all in the first, nearly nothing in the last."""
    if not 0 <= layer < layers:
        raise InputError("layer", layer, f"0 to {layers - 1}")
    return 1 - layer / (layers - 1) + 1e-5 if layerwise and layers > 1 else 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class LightningLayer:
    """One layer. rate: [heads] fp32, what the logarithm of every state falls by per token, slope times factor."""

    index: int
    heads: int
    head_dim: int
    rate: torch.Tensor

    @classmethod
    def of_model(
        cls, *, index: int, layers: int, heads: int, head_dim: int, device: torch.device | str, layerwise: bool = True
    ) -> "LightningLayer":
        """Layer `index` of a model of `layers` layers."""
        factor = layer_factor(index, layers, layerwise=layerwise)
        slopes = torch.tensor(alibi_slopes(heads), dtype=torch.float64)
        return cls(index=index, heads=heads, head_dim=head_dim, rate=(slopes * factor).float().to(device))


@dataclass(frozen=True, kw_only=True, eq=False)
class LightningInputs:
    """q, k, v: [tokens, heads, head_dim], heads dense."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class LightningBackend(LinearBackend):
    """Verify takes chains: a draft with several branches is refused."""

    name = "lightning"

    @classmethod
    def refusal(
        cls,
        stamp: LinearAttnBackends,
        geometry: StateGeometry,
        device: str,
        launcher: Launcher,
        *,
        topk: int = 0,
        deterministic: bool = False,
    ) -> str | None:
        if topk > 1:
            return f"lightning: needs topk <= 1, its verify is a chain, got {topk}"
        if geometry.conv_dim:
            return f"lightning: needs a pool without convolution, got conv_dim {geometry.conv_dim}"
        return cls.common_refusal(stamp, geometry, device, launcher)

    def forward(self, layer: LightningLayer, inputs: LightningInputs, metadata: LinearMetadata) -> torch.Tensor:
        if metadata.parents is not None:
            raise InputError("parents", tuple(metadata.parents.shape), "None: lightning verifies chains")
        expected = (layer.heads, layer.head_dim, layer.head_dim)
        if self.pool.geometry.temporal_shape != expected:
            raise InputError(f"layer {layer.index}", expected, f"{self.pool.geometry.temporal_shape}, as the pool")
        step = StepInputs(q=inputs.q, k=inputs.k, v=inputs.v, g=-layer.rate, beta=None)
        return self.recur(layer.index, step, self.pool.state_views(layer.index), metadata)
