"""Benchmarking faults: the clock is read at the wrong time, the cache is warm, the arms do not run alike.

The device is simulated: one stream, one L2 that a kernel leaves warm and a flush leaves cold, a host whose clock runs
on while the device works. So the right time is known. Blocks are timed on a machine that grows slower, in the order
in which the real scheduler runs them, and judged by the gate's own tests.
"""

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from msgspec.structs import replace

from suite import measure
from suite.e2e.faults.detection.serving import serving
from suite.e2e.faults.detection.signals import cell_of
from suite.e2e.faults.fault import Setting, Signal, plants
from suite.e2e.gate import latency, synthetic
from suite.e2e.gate.policy import parse_policy
from suite.e2e.gate.smoke import verdict_of
from suite.e2e.matrix import schedule
from suite.e2e.matrix.planned import PlannedCell
from suite.records import Arm

COLD_US, WARM_US, FLUSH_US, LAUNCH_US = 100.0, 25.0, 60.0, 3.0
KERNEL_BYTES, CEILING_TB_PER_S = 400e6, 4.2
ALPHA, BLOCKS, DRIFT = 0.05, 8, 0.01
HERE = "suite.e2e.faults.detection.benchmarking"


class SimulatedDevice:
    """What `suite.measure` needs of torch. Times in microseconds."""

    def __init__(self) -> None:
        self.host = self.device = 0.0
        self.is_warm = False
        self.captured: list[Callable[[], None]] | None = None
        simulated = self
        self.int8 = "int8"

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = max(simulated.device, simulated.host)

            def elapsed_time(self, end: "Event") -> float:
                return (end.at - self.at) / 1000

        class CUDAGraph:
            work: tuple[Callable[[], None], ...] = ()

            def replay(self) -> None:
                simulated.host += LAUNCH_US
                for each in self.work:
                    each()

        @contextlib.contextmanager
        def graph(into: CUDAGraph) -> Iterator[None]:
            self.captured = []
            yield
            into.work, self.captured = tuple(self.captured), None

        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            Stream=lambda: SimpleNamespace(wait_stream=lambda other: None),
            current_stream=lambda: SimpleNamespace(wait_stream=lambda other: None),
            stream=contextlib.nullcontext,
            CUDAGraph=CUDAGraph,
            graph=graph,
            Event=Event,
            synchronize=lambda: setattr(self, "host", max(self.host, self.device)),
        )

    def empty(self, *size: int, **more: object) -> Any:
        return SimpleNamespace(zero_=self.flush)

    def kernel(self) -> None:
        """A kernel that reads `KERNEL_BYTES`."""
        if self.captured is not None:
            self.captured.append(self._run)
        else:
            self.host += LAUNCH_US
            self._run()

    def flush(self) -> None:
        self.host += LAUNCH_US
        self.device = max(self.device, self.host) + FLUSH_US
        self.is_warm = False

    def _run(self) -> None:
        self.device = max(self.device, self.host) + (WARM_US if self.is_warm else COLD_US)
        self.is_warm = True


DEVICE = SimulatedDevice()


def timed(setting: Setting) -> Iterator[Signal]:
    """A kernel of known time and bytes, cold, by `suite.measure` on the simulated device."""
    DEVICE.__init__()  # type: ignore[misc]  # the same object: a fault's clock is its host's
    own, measure.torch = measure.torch, DEVICE  # type: ignore[attr-defined]
    try:
        times = measure.cold_times_us(DEVICE.kernel, 20)
    finally:
        measure.torch = own  # type: ignore[attr-defined]
    median = statistics.median(times)
    if abs(median / COLD_US - 1) > 0.05:
        yield Signal(name="time.known_kernel_off", text=f"{median:.1f} us for a kernel of {COLD_US:g} us")
    if (rate := KERNEL_BYTES / max(median, 1e-3) * 1e-6) > 1.05 * CEILING_TB_PER_S:
        text = f"{rate:.1f} TB/s read, more than the {CEILING_TB_PER_S} TB/s that a copy reaches"
        yield Signal(name="time.above_copy_ceiling", text=text)
    if max(times) > 1.5 * median:
        yield Signal(name="time.outlier", text=f"one sample of {max(times):.1f} us, the median is {median:.1f} us")


def drifting(setting: Setting) -> Iterator[Signal]:
    """Two equal arms on a machine that grows 1 % slower with every arm that runs; held to a true loss of zero."""
    arms = Arm(pool="static"), Arm(pool="static", label="replicate")
    planned = PlannedCell(cell=cell_of("engine"), arms=arms, timeout_s=60.0, blocks=BLOCKS)
    noise, slot, times = np.random.default_rng(setting.seed), 0, {arm: np.zeros(BLOCKS) for arm in arms}
    for block in schedule.cell_blocks(planned, setting.seed, {}):
        for job in block.jobs:
            times[job.arm][block.number] = 10 * math.exp(DRIFT * slot + noise.normal(0, 0.001))
            slot += 1
    ratios = latency.log_ratios(times[arms[0]].tolist(), times[arms[1]].tolist(), "lower")
    found = latency.t_test(ratios, 0.0, ALPHA)
    if found.p_beyond < ALPHA / 10:
        text = f"the static arm's replicate is {found.mean:.2%} slower than itself, p {found.p_beyond:.2g}"
        yield Signal(name="gate.replicate_differs", text=text)


POLICY = {
    "name": "faults",
    "alpha": 0.05,
    "fdr": 0.05,
    "power": 0.8,
    "baseline": "static",
    "candidates": ["unified"],
    "launchers": ["reference"],
    "smoke": "required",
    "rows": {"refused": "ignore", "crashed": "fail", "timed_out": "fail", "skipped": "inconclusive"},
    "endpoints": {
        "exact": {"kind": "exact"},
        "accuracy": {"kind": "accuracy", "margin": 0.05, "min_items": 60, "fail_when": "worse_than_zero"},
        "itl": {"kind": "latency", "metric": "itl_ms", "margin": 0.02, "looks": [4, 8], "fail_when": "beyond_margin"},
    },
    "cells": [{"select": {"family": ["engine"]}, "endpoints": ["exact", "accuracy", "itl"], "min_cells": 1}],
}


def decided(setting: Setting) -> Iterator[Signal]:
    """The gate on a clean cell as it arrives; anything but PASS is a signal."""
    rules = parse_policy(POLICY)
    inputs = synthetic.clean_inputs(rules, rules.cells[0], np.random.default_rng(setting.seed))
    if (verdict := verdict_of(rules, rules.cells[0], inputs)) != "PASS":
        yield Signal(name=f"gate.{verdict.lower().replace(' ', '_')}", text=f"the gate says {verdict}")


def candidate_rows(own: Any, change: Callable[[Any], Any]) -> Any:
    """Rows as they are, the candidate's changed."""
    return lambda arm, *rest: change(own(arm, *rest)) if arm == "unified" else own(arm, *rest)


def times_factor(factor: float) -> Callable[[Any], Any]:
    return lambda row: replace(row, values={name: value * factor for name, value in row.values.items()})


OFF, CEILING, ROW = "time.known_kernel_off", "time.above_copy_ceiling", "suite.e2e.gate.synthetic:make_row"
FAIL, UNSURE = "gate.fail", "gate.inconclusive"


@plants("benchmarking", "suite.measure:_timed", timed, CEILING, OFF, source="B36", smoke=True)
def clock_stopped_before_the_device(own: Any) -> Any:
    """the host's clock is read when the kernel is launched, not when it is done"""

    def launched(work: Any, samples: int, before: Any = lambda: None) -> list[float]:
        times = []
        for _ in range(samples):
            before()
            start = DEVICE.host
            work()
            times.append(DEVICE.host - start)
        return times

    return launched


@plants("benchmarking", "suite.measure:cold_times_us", timed, CEILING, OFF, source="B33", severity=75)
def cache_left_warm(own: Any) -> Any:
    """the L2 is not flushed between samples of a kernel that is bound by memory"""
    return lambda work, samples=100: measure.warm_times_us(work, samples)


@plants("benchmarking", "suite.measure:_timed", timed, OFF, source="B33", severity=60)
def flush_counted_as_work(own: Any) -> Any:
    """the flush between samples is inside the timed window"""
    return lambda work, samples, before=lambda: None: own(lambda: (before(), work()), samples)


@plants("benchmarking", "suite.e2e.matrix.schedule:cell_blocks", drifting, "gate.replicate_differs", source="B35")
def arms_always_in_one_order(own: Any) -> Any:
    """every block runs the static arm first: what slows down with time is the other arm's loss"""

    def ordered(planned: Any, seed: int, history: Any) -> Any:
        return [
            replace(block, jobs=tuple(sorted(block.jobs, key=lambda job: job.arm.label or "")))
            for block in own(planned, seed, history)
        ]

    return ordered


@plants("benchmarking", "suite.e2e.engine.engine:engine_allocator", serving(), "judge.identity_map", smoke=True)
def wrong_arm_measured(own: Any) -> Any:
    """the unified arm is built with the static pool: two equal runs agree perfectly"""

    def static(geometry: Any, config: Any) -> Any:
        from dataclasses import replace as changed

        return own(geometry, changed(config, pool="static"))

    return static


@plants("benchmarking", ROW, decided, FAIL, UNSURE)
def all_times_are_zero(own: Any) -> Any:
    """every time of the candidate is 0: nothing was measured"""
    return candidate_rows(own, times_factor(0.0))


@plants("benchmarking", ROW, decided, FAIL, UNSURE)
def times_are_no_numbers(own: Any) -> Any:
    """every time of the candidate is infinite"""
    return candidate_rows(own, lambda row: replace(row, values=dict.fromkeys(row.values, "inf")))


@plants("benchmarking", ROW, decided, FAIL, UNSURE, "gate.no_cell")
def cells_of_the_candidate_missing(own: Any) -> Any:
    """the candidate's rows timed out, and the averages are taken over the others"""
    return candidate_rows(
        own, lambda row: replace(row, status="timed_out", reason_code="timed_out", reason="timed out", values={})
    )


@plants("benchmarking", ROW, decided, FAIL, UNSURE)
def candidate_had_other_prompts(own: Any) -> Any:
    """the arms were asked different questions"""
    return candidate_rows(own, lambda row: replace(row, prompt_hash="others"))


@plants("benchmarking", ROW, decided, FAIL, UNSURE)
def candidate_had_another_launcher(own: Any) -> Any:
    """one arm was executed by the vendor's kernel, the other by the oracle"""
    return candidate_rows(own, lambda row: replace(row, launcher="native"))


@plants("benchmarking", ROW, decided, FAIL, severity=0.05)
def candidate_five_percent_slower(own: Any) -> Any:
    """the candidate is 5 % slower, at a margin of 2 %"""
    return candidate_rows(own, times_factor(1.05))
