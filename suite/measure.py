"""How long GPU work takes: CUDA events around replayed graphs, with the L2 cache cold or warm.

A replayed graph leaves launch cost on the host out, as a serving engine does. Cold times flush the L2
before each sample and hold the cost of one graph launch; warm times amortise that over many copies of
the work in one graph. Raw samples are returned: whoever reports takes the median and says how many.
"""

from collections.abc import Callable

import torch

from suite.errors import InputError

FLUSH_BYTES = 256 * 2**20  # several times the largest L2
WARM_COPIES = 20


def require_cuda(what: str) -> None:
    """InputError unless there is a GPU to measure on."""
    if not torch.cuda.is_available():
        raise InputError("device", "cpu", f"an NVIDIA GPU: {what} is timed with CUDA events")


def capture(work: Callable[[], object], copies: int = 1) -> torch.cuda.CUDAGraph:
    """A graph of `copies` runs of `work`; runs it a few times before, so that every kernel is compiled."""
    require_cuda("a graph")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(copies):
            work()
    return graph


def cold_times_us(work: Callable[[], object], samples: int = 100) -> list[float]:
    """Microseconds of one replay of `work`, with the L2 flushed before each."""
    graph = capture(work)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    return _timed(graph.replay, samples, before=flush.zero_)


def warm_times_us(work: Callable[[], object], samples: int = 100) -> list[float]:
    """Microseconds of one run of `work` inside a graph of many, so that its data is in the L2 where it fits."""
    graph = capture(work, WARM_COPIES)
    return [sample / WARM_COPIES for sample in _timed(graph.replay, samples)]


def _timed(work: Callable[[], object], samples: int, before: Callable[[], object] = lambda: None) -> list[float]:
    if samples < 1:
        raise InputError("samples", samples, "a positive number")
    for _ in range(3):
        before()
        work()
    events = []
    for _ in range(samples):
        before()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1000 for start, end in events]
