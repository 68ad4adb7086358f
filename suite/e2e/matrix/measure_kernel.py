"""What one kernel cell measures: one layer of each kind, without a model around it.

A *bench* holds what the cell's operation runs on. Its output is held against the fp32 oracle within the earned
tolerance (rows and ids against what they must be, exactly) and, by the parent, against the static arm bit by
bit; only then is time taken.
"""

from typing import Protocol

import torch

from suite.e2e.matrix.device import prepare_device
from suite.e2e.matrix.kernel_attention import AttentionBench
from suite.e2e.matrix.kernel_ids import TranslateBench, WriteBench
from suite.e2e.matrix.kernel_state import StateBench
from suite.e2e.matrix.kernel_times import Times
from suite.errors import InputError
from suite.provenance import provenance
from suite.records import CellJob, KernelOp, KernelWorkload, Metric, Outcome, PoolMode, Samples, content_hash


class Bench(Protocol):
    """One operation of one cell on one pool."""

    library: str  # the distribution whose kernels run

    def moved_share(self) -> tuple[float, int]:
        """Share of the requests' pages or slots that have moved, and of how many."""

    def check(self) -> tuple[torch.Tensor, float]:
        """(what both arms must have to the bit, flat fp32 on the host; the largest error over what is allowed)."""

    def time(self) -> tuple[dict[str, Metric], Times]:
        """Metrics, and the raw times behind them."""


BENCHES: dict[KernelOp, type] = {
    "decode": AttentionBench,
    "extend": AttentionBench,
    "verify": AttentionBench,
    "write": WriteBench,
    "translate": TranslateBench,
    "state_decode": StateBench,
    "state_prefill": StateBench,
    "state_verify": StateBench,
}


def measure_kernel(job: CellJob) -> Outcome:
    """Run one kernel cell's arm. Raises RefusedError when the backend cannot serve, InputError for bad input."""
    cell, workload = job.cell, job.cell.workload
    if not isinstance(workload, KernelWorkload):
        raise InputError("workload", workload.name, "a kernel workload: batch, tokens, query_tokens")
    prepare_device(cell)
    pool: PoolMode = job.arm.pool
    bench: Bench = BENCHES[workload.op](cell, workload, pool)
    metrics = {} if pool == "static" else {"moved_share": Metric.of("moved_share", *bench.moved_share())}
    out, worst = bench.check()
    metrics["error_ratio"] = Metric.of("error_ratio", worst, 1)
    output = Samples.pack("output", out.numpy())
    facts = {
        "launcher": cell.launcher,
        "provenance": provenance(cell.device, bench.library),
        "prompt_hash": content_hash((cell.model, cell.dtype, cell.seed, workload)),  # both arms hold the same numbers
    }
    if not worst <= 1.0:
        reason = f"error against fp32 is {worst:.3g} of what bf16 arithmetic earns, expected at most 1"
        return Outcome(
            status="wrong", reason_code="inaccurate", reason=reason, metrics=metrics, samples=(output,), **facts
        )
    found, times = bench.time()
    timings = [Samples.pack(name, values) for name, values in times.items()]
    return Outcome(status="passed", metrics=metrics | found, samples=(output, *timings), **facts)
