"""Token mixers without a pool: equally long sequences attend to themselves in one masked matrix.

Training uses it, and so does every comparison with an independent model. It is
the definition of what a paged backend must return. Everything is differentiable.
"""

import dataclasses

import torch
from torch.nn import functional as F

from suite.kernels.geometry import AttentionLayer
from suite.kernels.linear.delta import DeltaInputs, DeltaLayer
from suite.kernels.linear.lightning import LightningInputs, LightningLayer
from suite.kernels.ops.delta_chunk import ChunkPlan, ChunkResult, delta_chunk_torch
from suite.kernels.ops.delta_gates import delta_gates_torch
from suite.kernels.ops.delta_step import StepInputs
from suite.models.mixers import Expand


def visible(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [length, length]: may row's token attend to column's? Causal, and within `window` where given."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    allowed = distance >= 0
    return allowed if window is None else allowed & (distance < window)


class DenseMixers:
    """`Mixers` over `sequences` sequences of equal length, flattened one after the other.

    reads: int64 [layers, sequences], whose keys, values or states each sequence reads in each layer (training swaps
    layers with it); None: everybody its own. `expands_latent`: latent layers attend to expanded keys.
    """

    def __init__(self, sequences: int, reads: torch.Tensor | None = None, *, expands_latent: bool = False) -> None:
        self.sequences, self.reads, self.expands_latent = sequences, reads, expands_latent

    def attend(self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> torch.Tensor:
        v = k[..., : layer.out_dim] if v is None else v
        sequences, length, group = self.sequences, len(q) // self.sequences, layer.q_heads // layer.kv_heads
        q5 = q.view(sequences, length, layer.kv_heads, group, layer.head_dim)
        k4, v4 = (self._read(layer.index, x.unflatten(0, (sequences, length))) for x in (k, v))
        scores = torch.einsum("bqhgd,bkhd->bhgqk", q5, k4).float() * layer.scale
        scores = scores.masked_fill(~visible(length, layer.window, q.device), -torch.inf)
        if layer.sinks is not None:
            sinks = layer.sinks.view(1, layer.kv_heads, group, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        shares = scores.softmax(-1)[..., :length]
        out = torch.einsum("bhgqk,bkhd->bqhgd", shares.to(v.dtype), v4)
        return out.reshape(len(q), layer.q_heads, layer.out_dim)

    def attend_expanded(
        self, layer: AttentionLayer, q: torch.Tensor, rows: torch.Tensor, expand: Expand, scale: float
    ) -> torch.Tensor:
        keys, values = expand(rows)
        shape = {"kv_heads": layer.q_heads, "head_dim": keys.shape[2], "v_head_dim": values.shape[2]}
        return self.attend(dataclasses.replace(layer, scale=scale, is_latent=False, **shape), q, keys, values)

    def recur(self, layer: DeltaLayer | LightningLayer, inputs: DeltaInputs | LightningInputs) -> torch.Tensor:
        """The chunked recurrence from a state of zeros; all heads of all sequences are heads of one long request."""
        first = inputs.q if isinstance(layer, LightningLayer) else inputs.mixed
        with torch.autocast(first.device.type, enabled=False):  # products of decays need fp32
            if isinstance(layer, LightningLayer):
                step = self._lightning(layer, inputs)
            else:
                step = self._delta(layer, self.convolve(layer, inputs.mixed), inputs)
            out = self.recurrence(layer, step)  # [length, sequences * heads, V]
        return out.unflatten(1, (self.sequences, -1)).transpose(0, 1).flatten(0, 1).to(first.dtype)

    def after_layer(self, index: int, residual: torch.Tensor) -> None:
        """Nobody is fed."""

    def convolve(self, layer: DeltaLayer, mixed: torch.Tensor) -> torch.Tensor:
        """Depthwise causal convolution and SiLU within each sequence, fp32. mixed: [tokens, dim]."""
        weight = layer.conv_weight.float()
        channels = mixed.float().unflatten(0, (self.sequences, -1)).transpose(1, 2)
        padded = F.pad(channels, (weight.shape[1] - 1, 0))
        out = F.silu(F.conv1d(padded, weight[:, None], groups=len(weight)))
        return out.transpose(1, 2).contiguous().view(mixed.shape)

    def recurrence(self, layer: DeltaLayer | LightningLayer, step: StepInputs) -> torch.Tensor:
        """step: of all sequences, [length, sequences * heads, ...] -> [length, sequences * heads, V]."""
        return chunked(step, None).out

    # -- inside ----------------------------------------------------------------------------------

    def _read(self, layer: int, stored: torch.Tensor) -> torch.Tensor:
        """stored [sequences, ...], in the order in which the sequences read it."""
        return stored if self.reads is None else stored[self.reads[layer]]

    def _beside(self, x: torch.Tensor, stored_by: int | None = None) -> torch.Tensor:
        """[sequences * length, heads, ...] -> [length, sequences * heads, ...], as read where a layer stored it."""
        apart = x.unflatten(0, (self.sequences, -1))
        apart = (apart if stored_by is None else self._read(stored_by, apart)).transpose(0, 1)
        return apart.reshape(apart.shape[0], -1, *x.shape[2:]).contiguous()

    def _delta(self, layer: DeltaLayer, convolved: torch.Tensor, inputs: DeltaInputs) -> StepInputs:
        keys = layer.k_heads * layer.k_dim
        q, k, v = convolved.split([keys, keys, layer.v_heads * layer.v_dim], dim=1)
        g, beta = delta_gates_torch(inputs.a, inputs.b, layer.a_log, layer.dt_bias, layer.lower_bound)
        return StepInputs(
            q=self._beside(q.unflatten(1, (layer.k_heads, layer.k_dim))),
            k=self._beside(k.unflatten(1, (layer.k_heads, layer.k_dim)), layer.index),
            v=self._beside(v.unflatten(1, (layer.v_heads, layer.v_dim)), layer.index),
            g=self._beside(g, layer.index),
            beta=self._beside(beta, layer.index),
        )

    def _lightning(self, layer: LightningLayer, inputs: LightningInputs) -> StepInputs:
        q = self._beside(inputs.q.float())
        k, v = (self._beside(x.float(), layer.index) for x in (inputs.k, inputs.v))
        return StepInputs(q=q, k=k, v=v, g=-layer.rate.repeat(self.sequences), beta=None)


def chunked(step: StepInputs, state: torch.Tensor | None) -> ChunkResult:
    """One long request from `state` [1, heads, V, K], None: zeros."""
    tokens, heads, v_dim = step.v.shape
    if state is None:
        state = torch.zeros(1, heads, v_dim, step.k.shape[2], device=step.v.device)
    return delta_chunk_torch(step, state, ChunkPlan.create((tokens,), step.v.device))
