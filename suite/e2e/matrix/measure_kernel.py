"""What one kernel cell measures: one attention layer of each kind, without a model around it.

The output of every layer is held against the fp32 oracle within the earned tolerance and, by the parent,
against the static arm bit by bit; only then is time taken.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from suite.e2e.matrix.device import DTYPES, prepare_device
from suite.e2e.matrix.kernel_rig import KernelRig
from suite.errors import InputError, RefusedError
from suite.kernels.attention.base import AttentionBackend
from suite.kernels.attention.csr import window_start
from suite.kernels.attention.reference import attend
from suite.kernels.attention.support import backend_class, kernel_library
from suite.kernels.geometry import AttentionLayer, RunnerGeometry
from suite.kernels.shapes import attention_layers
from suite.measure import cold_times_us
from suite.provenance import provenance
from suite.records import CellJob, KernelWorkload, Metric, Outcome, Samples, content_hash

CHECKED_REQUESTS = 4  # held against the oracle, first and last among them


def measure_kernel(job: CellJob) -> Outcome:
    """Run one kernel cell's arm. Raises RefusedError when the backend cannot serve, InputError for bad input."""
    cell, workload = job.cell, job.cell.workload
    if not isinstance(workload, KernelWorkload):
        raise InputError("workload", workload.name, "a kernel workload: batch, tokens, query_tokens")
    prepare_device(cell)
    layers = attention_layers(cell.model, cell.device)
    sinks = any(layer.sinks is not None for layer in layers)
    cls = backend_class(cell.backend)
    geometry = RunnerGeometry.from_layers(layers, DTYPES[cell.dtype], cell.page_size)
    if reason := cls.refusal(geometry, job.arm.pool, cell.device, cell.launcher, sinks):
        raise RefusedError(reason)
    rig = KernelRig(cell, workload, job.arm.pool)
    backend = cls(pool=rig.allocator.pool, translator=rig.translator, launcher=cell.launcher, sinks=sinks)
    share, live = rig.moved_share()
    metrics = {} if job.arm.pool == "static" else {"moved_share": Metric.of("moved_share", share, live)}
    kinds = {layer.kind: layer for layer in rig.layers}  # one layer of each kind
    samples, worst = [], 0.0
    for layer in kinds.values():
        out, ratio = check_layer(rig, backend, layer)
        samples.append(out.reshape(-1))
        worst = max(worst, ratio)
    metrics["error_ratio"] = Metric.of("error_ratio", worst, len(kinds))
    output = Samples.pack("output", torch.cat(samples).numpy())
    facts = {
        "launcher": backend.launcher,
        "provenance": provenance(cell.device, kernel_library(cell.backend, backend.launcher)),
        "prompt_hash": content_hash((cell.model, cell.dtype, cell.seed, workload)),  # both arms hold the same numbers
    }
    if not worst <= 1.0:
        reason = f"error against fp32 is {worst:.3g} of what bf16 arithmetic earns, expected at most 1"
        return Outcome(
            status="wrong", reason_code="inaccurate", reason=reason, metrics=metrics, samples=(output,), **facts
        )
    timings: list[Samples] = []
    for layer in kinds.values():
        found, times = time_layer(rig, backend, layer)
        metrics |= found
        timings += [Samples.pack(name, values) for name, values in times.items()]
    return Outcome(status="passed", metrics=metrics, samples=(output, *timings), **facts)


def check_layer(rig: KernelRig, backend: AttentionBackend, layer: AttentionLayer) -> tuple[torch.Tensor, float]:
    """(output of the checked requests, fp32 on the host; its largest error over the earned tolerance)."""
    queries, batch = rig.workload.query_tokens, rig.workload.batch
    q = rig.queries(layer)
    out = backend.forward(layer, q, *rig.newest(layer), backend.plan(rig.batch))
    picked = sorted({round(i * (batch - 1) / max(CHECKED_REQUESTS - 1, 1)) for i in range(CHECKED_REQUESTS)})
    kept, worst = [], 0.0
    for request in picked:
        mine = slice(request * queries, (request + 1) * queries)
        k, v = rig.rows(layer, request)
        start = 0 if layer.window is None else window_start(rig.workload.tokens, queries, layer.window)
        k, v, first = k[start:], v[start:], rig.workload.tokens - queries - start
        exact = attend(q[mine].double(), k.double(), v.double(), layer, first, torch.float64)
        rough = attend(q[mine], k, v, layer, first, rig.dtype)
        eps = torch.finfo(rig.dtype).eps * float(exact.abs().max())
        allowed = 2 * float((rough.double() - exact).abs().max()) + eps
        error = (out[mine].double() - exact).abs().max()
        worst = max(worst, float("inf") if not bool(error.isfinite()) else float(error) / allowed)
        kept.append(out[mine].float().cpu())
    return torch.cat(kept), worst


def time_layer(
    rig: KernelRig, backend: AttentionBackend, layer: AttentionLayer
) -> tuple[dict[str, Metric], dict[str, list[float]]]:
    """Latency of the layer, of its write and of the batch's metadata, and the KV bytes it must read; raw times too."""
    metadata, q, (k, v) = backend.plan(rig.batch), rig.queries(layer), rig.newest(layer)
    ids = metadata.write_ids_of(layer.kind)
    work: dict[str, Callable[[], object]] = {
        "layer_us": lambda: backend.forward(layer, q, k, v, metadata),
        "write_us": lambda: rig.allocator.pool.write(layer.index, ids, k, v),
    }
    times = {name: _times_us(run, rig) for name, run in work.items()}
    times["metadata_us"] = _host_times_us(lambda: backend.plan(replace(rig.batch)), rig)  # a new batch: no memo
    seen = rig.workload.tokens if layer.window is None else min(rig.workload.tokens, layer.window)
    kv_bytes = rig.workload.batch * seen * rig.allocator.pool.geometry.of(layer.kind).layer_bytes
    found = {name: (statistics.median(values), len(values)) for name, values in times.items()}
    attention_us = found["layer_us"][0] - found["write_us"][0]
    found["kv_bytes"] = (kv_bytes, 1)
    found["tb_per_s"] = (kv_bytes / max(attention_us, 1e-3) * 1e-6, found["layer_us"][1])
    if rig.device.type == "cuda":
        found["copy_share"] = (found["tb_per_s"][0] / copy_tb_per_s(), 1)
    metrics = {f"{name}.{layer.kind}": Metric.of(name, value, n) for name, (value, n) in found.items()}
    return metrics, {f"{name}.{layer.kind}": values for name, values in times.items()}


def copy_tb_per_s(elements: int = 2**29) -> float:
    """Bytes read and written per second by a large elementwise kernel, in TB/s: the ceiling of a kernel.

    Not a copy: replayed from a graph, one read 2.7 TB/s on an H200 whose kernels reach 4.2.
    """
    source = torch.zeros(elements, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    moved = 2 * source.nbytes
    return moved / statistics.median(cold_times_us(lambda: torch.neg(source, out=target), 10)) * 1e-6


def _times_us(run: Callable[[], object], rig: KernelRig) -> list[float]:
    if rig.device.type == "cuda":
        return cold_times_us(run, rig.workload.samples)
    return _host_times_us(run, rig)


def _host_times_us(run: Callable[[], object], rig: KernelRig) -> list[float]:
    """Host clock, until the device has finished."""
    times = []
    for _ in range(rig.workload.samples + 1):
        start = time.perf_counter()
        run()
        if rig.device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return times[1:]
