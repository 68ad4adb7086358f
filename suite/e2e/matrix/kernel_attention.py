"""Attention cells: one layer of each kind decodes, extends or verifies over a filled pool."""

import statistics
from dataclasses import replace

import torch

from suite.e2e.matrix.device import DTYPES
from suite.e2e.matrix.kernel_rig import KernelRig
from suite.e2e.matrix.kernel_times import Times, bandwidth, host_times_us, metrics_of, times_us
from suite.errors import RefusedError
from suite.kernels.attention.csr import window_start
from suite.kernels.attention.reference import attend
from suite.kernels.attention.support import backend_class, kernel_library
from suite.kernels.geometry import AttentionLayer, RunnerGeometry
from suite.kernels.shapes import attention_layers
from suite.records import Cell, KernelWorkload, Metric, PoolMode

CHECKED_REQUESTS = 4  # held against the oracle, first and last among them


class AttentionBench:
    """One backend on one filled pool. RefusedError, before anything is allocated, where it cannot serve."""

    def __init__(self, cell: Cell, workload: KernelWorkload, pool: PoolMode) -> None:
        layers = attention_layers(cell.model, cell.device)
        sinks = any(layer.sinks is not None for layer in layers)
        cls = backend_class(cell.backend)
        geometry = RunnerGeometry.from_layers(layers, DTYPES[cell.dtype], cell.page_size)
        if reason := cls.refusal(geometry, pool, cell.device, cell.launcher, sinks):
            raise RefusedError(reason)
        self.library = kernel_library(cell.backend, cell.launcher)
        self.rig = KernelRig(cell, workload, pool)
        self.backend = cls(
            pool=self.rig.allocator.pool, translator=self.rig.translator, launcher=cell.launcher, sinks=sinks
        )
        self.moved_share = self.rig.moved_share

    def check(self) -> tuple[torch.Tensor, float]:
        checked = [self._check(layer) for layer in self.rig.kinds]
        return torch.cat([out for out, _ in checked]), max(ratio for _, ratio in checked)

    def time(self) -> tuple[dict[str, Metric], Times]:
        metrics: dict[str, Metric] = {}
        raw: Times = {}
        for layer in self.rig.kinds:
            found, times = self._time(layer)
            metrics |= found
            raw |= {f"{name}.{layer.kind}": values for name, values in times.items()}
        return metrics, raw

    def _check(self, layer: AttentionLayer) -> tuple[torch.Tensor, float]:
        rig, workload = self.rig, self.rig.workload
        queries, q = workload.query_tokens, rig.queries(layer)
        out = self.backend.forward(layer, q, *rig.newest(layer), self.backend.plan(rig.batch))
        kept, worst = [], 0.0
        for request in picked(workload.batch):
            mine = slice(request * queries, (request + 1) * queries)
            k, v = rig.rows(layer, request)
            start = 0 if layer.window is None else window_start(workload.tokens, queries, layer.window)
            k, v, first = k[start:], v[start:], workload.tokens - queries - start
            exact = attend(q[mine].double(), k.double(), v.double(), layer, first, torch.float64)
            worst = max(worst, error_ratio(out[mine], exact, attend(q[mine], k, v, layer, first, rig.dtype)))
            kept.append(out[mine].float().cpu().flatten())
        return torch.cat(kept), worst

    def _time(self, layer: AttentionLayer) -> tuple[dict[str, Metric], Times]:
        """Latency of the layer, of its write and of the batch's metadata, and the KV bytes it must read."""
        rig, backend, samples = self.rig, self.backend, self.rig.workload.samples
        metadata, q, (k, v) = backend.plan(rig.batch), rig.queries(layer), rig.newest(layer)
        ids, pool = metadata.write_ids_of(layer.kind), rig.allocator.pool
        times = {
            "layer_us": times_us(lambda: backend.forward(layer, q, k, v, metadata), rig.device, samples),
            "write_us": times_us(lambda: pool.write(layer.index, ids, k, v), rig.device, samples),
            # a new batch each time: no memo
            "metadata_us": host_times_us(lambda: backend.plan(replace(rig.batch)), rig.device, samples),
        }
        seen = rig.workload.tokens
        if layer.window is not None:
            seen = min(seen, layer.window + rig.workload.query_tokens - 1)
        kv_bytes = rig.workload.batch * seen * pool.geometry.of(layer.kind).layer_bytes
        attention_us = statistics.median(times["layer_us"]) - statistics.median(times["write_us"])
        metrics = metrics_of(times, layer.kind) | {f"kv_bytes.{layer.kind}": Metric.of("kv_bytes", kv_bytes, 1)}
        return metrics | bandwidth(kv_bytes, attention_us, samples, rig.device, layer.kind), times


def picked(batch: int) -> list[int]:
    """Requests that are checked, spread over the batch."""
    return sorted({round(i * (batch - 1) / max(CHECKED_REQUESTS - 1, 1)) for i in range(CHECKED_REQUESTS)})


def error_ratio(out: torch.Tensor, exact: torch.Tensor, rough: torch.Tensor) -> float:
    """Error against `exact` over what is earned: 2x the error of the same maths in less precision, plus one rounding.

    Infinite for an output that is not finite.
    """
    eps = torch.finfo(out.dtype).eps * float(exact.abs().max())
    allowed = 2 * float((rough.double() - exact.double()).abs().max()) + eps
    error = (out.double() - exact.double()).abs().max()
    return float(error) / allowed if bool(error.isfinite()) else float("inf")
