"""How a kernel cell takes time and tells a bandwidth: cold graph replays on a GPU, the host clock elsewhere."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from suite.measure import cold_times_us
from suite.records import Metric

Times = dict[str, list[float]]  # metric -> microseconds of every sample


def times_us(run: Callable[[], object], device: torch.device, samples: int) -> list[float]:
    """Microseconds of `run`, with a cold L2 on a GPU."""
    return cold_times_us(run, samples) if device.type == "cuda" else host_times_us(run, device, samples)


def host_times_us(run: Callable[[], object], device: torch.device, samples: int) -> list[float]:
    """Host clock, until the device has finished; the first run is not counted."""
    times = []
    for _ in range(samples + 1):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return times[1:]


def metrics_of(times: Mapping[str, list[float]], suffix: str) -> dict[str, Metric]:
    """The median of each list of times, as `name.suffix`."""
    return {f"{name}.{suffix}": Metric.of(name, statistics.median(each), len(each)) for name, each in times.items()}


def bandwidth(moved_bytes: int, us: float, samples: int, device: torch.device, suffix: str) -> dict[str, Metric]:
    """TB/s of `moved_bytes` in `us` microseconds, and on a GPU its share of `copy_tb_per_s`."""
    rate = moved_bytes / max(us, 1e-3) * 1e-6
    found = {f"tb_per_s.{suffix}": Metric.of("tb_per_s", rate, samples)}
    if device.type == "cuda":
        found[f"copy_share.{suffix}"] = Metric.of("copy_share", rate / copy_tb_per_s(), 1)
    return found


def copy_tb_per_s(elements: int = 2**29) -> float:
    """Bytes read and written per second by a large elementwise kernel, in TB/s: the ceiling of a kernel.

    Not a copy: replayed from a graph, one read 2.7 TB/s on an H200 whose kernels reach 4.2.
    """
    source = torch.zeros(elements, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    moved = 2 * source.nbytes
    return moved / statistics.median(cold_times_us(lambda: torch.neg(source, out=target), 10)) * 1e-6
