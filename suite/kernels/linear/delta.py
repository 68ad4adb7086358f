"""The delta-rule layer that GDN and KDA share: convolution, gates, recurrence, each in the metadata's mode."""

from dataclasses import dataclass

import torch

from suite.errors import InputError
from suite.kernels.linear.base import LinearBackend
from suite.kernels.linear.metadata import LinearMetadata, LinearMode
from suite.kernels.ops.causal_conv import ConvBatch
from suite.kernels.ops.delta_step import StepInputs
from suite.kernels.ops.state_rows import gather_rows, scatter_rows
from suite.kernels.pools.state import StateGeometry, StateViews


@dataclass(frozen=True, kw_only=True, eq=False)
class DeltaLayer:
    """One GDN or KDA layer.

    conv_weight: [2 k_heads k_dim + v_heads v_dim, kernel], channels q | k | v. a_log: [v_heads] fp32.
    dt_bias: [v_heads] (GDN) or [v_heads, k_dim] (KDA) fp32. lower_bound: KDA's safe gate, None for the plain one.
    """

    index: int
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv_weight: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    lower_bound: float | None = None

    @property
    def conv_dim(self) -> int:
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim


@dataclass(frozen=True, kw_only=True, eq=False)
class DeltaInputs:
    """mixed: [tokens, conv_dim], q | k | v before the convolution. a: decay projection, [tokens, v_heads] (GDN) or
    [tokens, v_heads, k_dim] (KDA). b: [tokens, v_heads], projection of the write strength."""

    mixed: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor


class DeltaBackend(LinearBackend):
    """Forward of GDN and KDA; the families differ in gates, window layout and what they refuse."""

    def forward(self, layer: DeltaLayer, inputs: DeltaInputs, metadata: LinearMetadata) -> torch.Tensor:
        self._check(layer, inputs)
        views = self.pool.state_views(layer.index)
        mixed = self._convolve(layer, inputs.mixed, views, metadata)
        keys = layer.k_heads * layer.k_dim
        q, k, v = mixed.split([keys, keys, layer.v_heads * layer.v_dim], dim=1)
        g, beta = self.ops.gates(inputs.a, inputs.b, layer.a_log, layer.dt_bias, layer.lower_bound)
        step = StepInputs(
            q=q.unflatten(1, (layer.k_heads, layer.k_dim)),
            k=k.unflatten(1, (layer.k_heads, layer.k_dim)),
            v=v.unflatten(1, (layer.v_heads, layer.v_dim)),
            g=g,
            beta=beta,
        )
        return self.recur(layer.index, step, views, metadata)

    def _convolve(
        self, layer: DeltaLayer, mixed: torch.Tensor, views: StateViews, metadata: LinearMetadata
    ) -> torch.Tensor:
        windows, slots = views.conv, metadata.slots.tensor
        assert windows is not None  # the refusal saw to it

        def convolve(source: torch.Tensor, rows: torch.Tensor, into: torch.Tensor, into_rows: torch.Tensor):
            batch = ConvBatch(
                cu_query_lens=metadata.cu_query_lens,
                max_query_len=metadata.max_query_len,
                slots=rows,
                parents=metadata.parents,
            )
            return self.ops.conv(
                mixed,
                layer.conv_weight,
                source,
                batch,
                taps_first=self.pool.geometry.taps_first,
                out_windows=into,
                out_rows=into_rows,
                every_token=metadata.mode is LinearMode.VERIFY,
            )

        if metadata.mode is LinearMode.DECODE:
            return convolve(windows, slots, windows, slots)
        assert metadata.rows is not None
        if metadata.mode is LinearMode.VERIFY:
            scratch = self._scratch_of(metadata.max_query_len).state_views(layer.index).conv
            assert scratch is not None
            return convolve(windows, slots, scratch, metadata.rows)
        assert metadata.sources is not None
        before = gather_rows(windows, metadata.sources)
        after = torch.empty_like(before)
        out = convolve(before, metadata.rows, after, metadata.rows)
        scatter_rows(windows, slots, after)
        if (tracked := metadata.tracking) is not None:
            held = mixed[tracked.window]  # [snapshots, width, conv_dim]
            held = held if self.pool.geometry.taps_first else held.transpose(1, 2).contiguous()
            scatter_rows(windows, tracked.slots, held)
        return out

    def _check(self, layer: DeltaLayer, inputs: DeltaInputs) -> None:
        geometry = self.pool.geometry
        expected = (geometry.conv_dim, *geometry.temporal_shape, geometry.conv_width + 1)
        got = (layer.conv_dim, layer.v_heads, layer.v_dim, layer.k_dim, layer.conv_weight.shape[1])
        if got != expected:
            raise InputError(f"layer {layer.index}", got, f"{expected}: conv_dim, v_heads, v_dim, k_dim, kernel")
        if inputs.mixed.dtype != geometry.conv_dtype:
            # windows hold these very inputs: a rounded copy would make prefill and decode disagree
            raise InputError("mixed.dtype", inputs.mixed.dtype, f"{geometry.conv_dtype}, as the stored windows")
        if inputs.mixed.shape[1:] != (layer.conv_dim,) or inputs.a.shape[0] != inputs.mixed.shape[0]:
            shapes = (tuple(inputs.mixed.shape), tuple(inputs.a.shape))
            raise InputError("mixed, a", shapes, f"[tokens, {layer.conv_dim}] and as many tokens")


def window_refusal(name: str, geometry: StateGeometry, *, taps_first: bool) -> str | None:
    """Why windows of this layout do not serve a family; None when they do."""
    layout = "[width, dim]" if taps_first else "[dim, width]"
    if not geometry.conv_dim:
        return f"{name}: needs convolution windows {layout}, got a pool without convolution"
    if geometry.taps_first != taps_first:
        return f"{name}: needs convolution windows {layout}, got {'[dim, width]' if taps_first else '[width, dim]'}"
    return None
