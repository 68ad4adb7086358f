"""Cells of recurrent state: one layer decodes, prefills or verifies on slots of a static or a unified pool.

On a unified pool a slot is one envelope of all layers, so views are strided, and every request's slot has been
moved, its old place poisoned, before anything counts. Numbers depend on the seed and the request alone.
"""

import statistics
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from suite.e2e.matrix.device import DTYPES
from suite.e2e.matrix.kernel_attention import error_ratio
from suite.e2e.matrix.kernel_times import Times, bandwidth, host_times_us, metrics_of, times_us
from suite.errors import RefusedError
from suite.kernels.batch import ForwardMode
from suite.kernels.linear import linear_backend_class
from suite.kernels.linear.base import LinearBackend
from suite.kernels.linear.delta import DeltaInputs, DeltaLayer
from suite.kernels.linear.lightning import LightningInputs, LightningLayer
from suite.kernels.linear.metadata import LinearMetadata
from suite.kernels.linear.naive import naive_conv, naive_delta, naive_gates, naive_lightning
from suite.kernels.linear.stamp import LinearAttnFlags, resolve, stamp_runner
from suite.kernels.pools.state import KernelSlots, StateGeometry, StatePool
from suite.kernels.shapes import STATE_SHAPES
from suite.records import Cell, KernelWorkload, Metric, PoolMode

LAYERS = (0, 1)  # of the pool; the second one is run, so that an envelope is wider than its states
LAYER = 1
MODES = {"state_decode": ForwardMode.DECODE, "state_prefill": ForwardMode.EXTEND, "state_verify": ForwardMode.VERIFY}


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearBatch:
    """What a plan reads of a batch."""

    mode: ForwardMode
    cu_query_lens: torch.Tensor
    seq_lens_host: tuple[int, ...]
    query_lens_host: tuple[int, ...]


class StateBench:
    """One layer of the cell's shape, its slots filled. RefusedError where the backend cannot serve."""

    def __init__(self, cell: Cell, workload: KernelWorkload, mode: PoolMode) -> None:
        if cell.model not in STATE_SHAPES:
            raise RefusedError(f"{workload.op}: needs model {' or '.join(STATE_SHAPES)}, got {cell.model}")
        self.family, self.k_heads, self.v_heads, self.dim = STATE_SHAPES[cell.model]
        if cell.backend != self.family:
            raise RefusedError(f"{workload.op}: needs backend {self.family} for {cell.model}, got {cell.backend}")
        self.workload, self.seed, self.dtype = workload, cell.seed, DTYPES[cell.dtype]
        self.device = torch.device(cell.device)
        cls, runner = linear_backend_class(cell.backend), SimpleNamespace()
        stamp = resolve(LinearAttnFlags())
        stamp_runner(runner, stamp)
        geometry = self._geometry()
        if reason := cls.refusal(stamp, geometry, cell.device, cell.launcher):
            raise RefusedError(reason)
        self.library = "torch" if cell.launcher == "reference" else "triton"
        self.pool, self.slots = self._filled(geometry, mode)
        self.backend: LinearBackend = cls(runner=runner, pool=self.pool, launcher=cell.launcher)
        if workload.op == "state_verify":
            self.backend.reserve_verify(workload.batch, workload.query_tokens)
        self.layer, self.inputs = self._layer(), self._inputs()
        self.batch = self._batch()

    def moved_share(self) -> tuple[float, int]:
        return float((self.slots > self.workload.batch).float().mean()), self.workload.batch

    def check(self) -> tuple[torch.Tensor, float]:
        """The first and the last request's outputs and, but for a verify, the states they leave."""
        requests = sorted({0, self.workload.batch - 1})
        before = [self._state_of(request) for request in requests]
        out = self.backend.forward(self.layer, self.inputs, self._plan())
        kept, worst, queries = [], 0.0, self.workload.query_tokens
        for request, (window, state) in zip(requests, before, strict=True):
            mine = slice(request * queries, (request + 1) * queries)
            exact, after = self._oracle(mine, window, state, torch.float64)
            rough, rough_after = self._oracle(mine, window, state, torch.bfloat16)
            worst = max(worst, error_ratio(out[mine], exact, rough))
            kept.append(out[mine])
            if self.workload.op != "state_verify":
                kept.append(self._state_of(request)[1])
                worst = max(worst, error_ratio(kept[-1], after, rough_after))
        return torch.cat([each.float().cpu().flatten() for each in kept]), worst

    def time(self) -> tuple[dict[str, Metric], Times]:
        metadata, samples = self._plan(), self.workload.samples
        times = {
            "layer_us": times_us(lambda: self.backend.forward(self.layer, self.inputs, metadata), self.device, samples),
            "metadata_us": host_times_us(self._plan, self.device, samples),
        }
        geometry = self.pool.geometry
        written = self.workload.query_tokens if self.workload.op == "state_verify" else 1
        moved = self.workload.batch * (1 + written) * (geometry.temporal_bytes + geometry.conv_bytes)
        metrics = metrics_of(times, "state") | {"state_bytes.state": Metric.of("state_bytes", moved, 1)}
        us = statistics.median(times["layer_us"])
        metrics |= bandwidth(moved, us, samples, self.device, "state")
        return metrics, {f"{name}.state": values for name, values in times.items()}

    # -- inside ----------------------------------------------------------------------------------

    def _geometry(self) -> StateGeometry:
        return StateGeometry(
            layers=LAYERS,
            conv_dim=0 if self.family == "lightning" else (2 * self.k_heads + self.v_heads) * self.dim,
            v_heads=self.v_heads,
            v_dim=self.dim,
            k_dim=self.dim,
            taps_first=self.family == "kda",
            conv_dtype=self.dtype,
        )

    def _filled(self, geometry: StateGeometry, mode: PoolMode) -> tuple[StatePool, torch.Tensor]:
        """A pool of twice the slots, and the slot of every request: its first one, or where it was moved to."""
        batch = self.workload.batch
        first = torch.arange(1, batch + 1, device=self.device)
        if mode == "static":
            pool = StatePool.static(geometry, 2 * batch, self.device, poison=True)
        else:
            size = (2 * batch + 1) * geometry.slot_bytes
            buffer = torch.zeros(size, dtype=torch.uint8, device=self.device)
            pool = StatePool.strided(geometry, 2 * batch, buffer, poison=True)
        generator = torch.Generator(self.device).manual_seed(self.seed)
        for stream in pool.streams():
            for slot in first.tolist():
                shape = stream[:, slot].shape
                stream[:, slot] = torch.randn(shape, generator=generator, device=self.device).to(stream.dtype)
        if mode == "static":
            return pool, first
        moved = 2 * batch + 1 - first  # the other half, in reverse
        pool.copy_slots(KernelSlots(first), KernelSlots(moved))
        pool.poison_slots(first)
        return pool, moved

    def _randn(self, *shape: int, dtype: torch.dtype | None = None, salt: int) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(self.seed * 1_000_003 + salt)
        return torch.randn(shape, generator=generator, device=self.device).to(dtype or self.dtype)

    def _layer(self) -> Any:
        if self.family == "lightning":
            return LightningLayer.of_model(
                index=LAYER, layers=8, heads=self.v_heads, head_dim=self.dim, device=self.device
            )
        gate = (self.v_heads, self.dim) if self.family == "kda" else (self.v_heads,)
        return DeltaLayer(
            index=LAYER,
            k_heads=self.k_heads,
            v_heads=self.v_heads,
            k_dim=self.dim,
            v_dim=self.dim,
            conv_weight=self._randn(self.pool.geometry.conv_dim, self.pool.geometry.conv_width + 1, salt=1),
            a_log=self._randn(self.v_heads, dtype=torch.float32, salt=2),
            dt_bias=self._randn(*gate, dtype=torch.float32, salt=3),
        )

    def _inputs(self) -> Any:
        tokens = self.workload.batch * self.workload.query_tokens
        if self.family == "lightning":
            q, k, v = (self._randn(tokens, self.v_heads, self.dim, salt=4 + i) for i in range(3))
            return LightningInputs(q=q, k=k, v=v)
        gate = (self.v_heads, self.dim) if self.family == "kda" else (self.v_heads,)
        return DeltaInputs(
            mixed=self._randn(tokens, self.pool.geometry.conv_dim, salt=4),
            a=self._randn(tokens, *gate, salt=5),
            b=self._randn(tokens, self.v_heads, salt=6),
        )

    def _batch(self) -> LinearBatch:
        batch, queries = self.workload.batch, self.workload.query_tokens
        offsets = torch.arange(batch + 1, dtype=torch.int32, device=self.device) * queries
        return LinearBatch(
            mode=MODES[self.workload.op],
            cu_query_lens=offsets,
            seq_lens_host=(self.workload.tokens,) * batch,
            query_lens_host=(queries,) * batch,
        )

    def _plan(self) -> LinearMetadata:
        verify = self.workload.op == "state_verify"
        return self.backend.plan(self.batch, KernelSlots(self.slots), verify=verify)

    def _state_of(self, request: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(window [dim, width], or None without convolution; state [v_heads, V, K]), copies; zeros where it begins."""
        views, slot = self.pool.state_views(LAYER), int(self.slots[request])
        window = None if views.conv is None else views.conv[slot].clone()
        if window is not None and self.pool.geometry.taps_first:
            window = window.T
        return window, views.temporal[slot].clone()

    def _oracle(
        self, mine: slice, window: torch.Tensor | None, state: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, state after the last token) of one request's tokens `mine`, token by token in `dtype`."""
        if self.workload.tokens == self.workload.query_tokens:  # a prompt's first prefill starts from nothing
            window, state = None if window is None else torch.zeros_like(window), torch.zeros_like(state)
        layer, inputs = self.layer, self.inputs
        if window is None:
            out, states = naive_lightning(inputs.q[mine], inputs.k[mine], inputs.v[mine], layer.rate, state, dtype)
            return out, states[-1]
        mixed, _ = naive_conv(inputs.mixed[mine], layer.conv_weight, window, dtype)
        keys = self.k_heads * self.dim
        q, k, v = mixed.split([keys, keys, self.v_heads * self.dim], 1)
        g, beta = naive_gates(inputs.a[mine], inputs.b[mine], layer.a_log, layer.dt_bias, None, dtype)
        q, k, v = (each.reshape(each.shape[0], -1, self.dim) for each in (q, k, v))
        out, states = naive_delta(q, k, v, g, beta, state, None, dtype)
        return out, states[-1]
