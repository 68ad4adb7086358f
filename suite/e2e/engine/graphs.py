"""Captured decode: one graph per padded batch size, replayed over buffers that never move.

On CUDA a graph is a `torch.cuda.CUDAGraph`. On a CPU the same discipline holds without one: the
step reads the metadata and the input buffers of its capture, which are refilled and never rebound,
so a stale or rebound table fails here as it would there.
"""

from collections.abc import Callable

import torch

from suite.kernels.attention.base import AttentionBackend, Metadata
from suite.kernels.batch import ForwardBatch

ModelStep = Callable[[torch.Tensor, torch.Tensor, Metadata], torch.Tensor]


def padded_sizes(max_batch: int) -> list[int]:
    """Batch sizes to capture: powers of two, and `max_batch` itself."""
    sizes, size = [], 1
    while size < max_batch:
        sizes.append(size)
        size *= 2
    return [*sizes, max_batch]


class DecodeGraphs:
    """Graphs of `step(input_ids, positions, metadata) -> logits [lanes, vocab]`.

    `padding(lanes)` gives a decode batch of padding requests only; it is captured on, largest size first.
    """

    def __init__(
        self, step: ModelStep, backend: AttentionBackend, padding: Callable[[int], ForwardBatch], max_batch: int
    ) -> None:
        self.sizes = padded_sizes(max_batch)
        self._backend = backend
        device = backend.pool.device
        self._input_ids = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_batch, dtype=torch.int64, device=device)
        backend.capture(max_batch)
        self._replays = {
            lanes: self._capture(step, backend.replay(padding(lanes)), lanes) for lanes in reversed(self.sizes)
        }

    def lanes_for(self, batch: int) -> int:
        return next(size for size in self.sizes if size >= batch)

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [lanes, vocab] fp32 of a batch that is padded to a captured size; valid until the next run."""
        self._input_ids[: batch.size].copy_(batch.input_ids)
        self._positions[: batch.size].copy_(batch.positions)
        self._backend.replay(batch)
        return self._replays[batch.size]()

    def _capture(self, step: ModelStep, metadata: Metadata, lanes: int) -> Callable[[], torch.Tensor]:
        ids, positions = self._input_ids[:lanes], self._positions[:lanes]
        if ids.device.type == "cpu":
            return lambda: step(ids, positions, metadata)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(ids, positions, metadata)  # compiles kernels and creates handles outside the capture
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step(ids, positions, metadata)

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return replay
