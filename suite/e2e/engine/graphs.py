"""Captured decode and verify: one graph per mode and padded batch size, replayed over buffers that never move.

On CUDA a graph is a `torch.cuda.CUDAGraph`. On a CPU the same discipline holds without one: the
step reads the metadata and the input buffers of its capture, which are refilled and never rebound,
so a stale or rebound table fails here as it would there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from suite.kernels.batch import ForwardBatch, ForwardMode


@dataclass(frozen=True, kw_only=True, eq=False)
class Forwarded:
    """What a forward leaves: final hidden states [tokens, hidden], and the features of `feature_layers`, if any."""

    hidden: torch.Tensor
    logits: torch.Tensor  # fp32 [tokens, vocab]
    features: torch.Tensor | None = None  # [tokens, layers * hidden]


@dataclass(frozen=True, kw_only=True, eq=False)
class CapturedStep:
    """What is to be captured. `query_len`: new tokens per request; `padding(mode, lanes)`: a batch of padding requests.

    `refill(batch)` refills every stable table and returns the step to run over them, which takes the stable
    input ids and positions.
    """

    mode: ForwardMode
    query_len: int
    padding: Callable[[ForwardMode, int], ForwardBatch]
    refill: Callable[[ForwardBatch], Callable[[torch.Tensor, torch.Tensor], Forwarded]]


def padded_sizes(max_batch: int) -> list[int]:
    """Batch sizes to capture: powers of two, and `max_batch` itself."""
    sizes, size = [], 1
    while size < max_batch:
        sizes.append(size)
        size *= 2
    return [*sizes, max_batch]


class StepGraphs:
    """Graphs of decode and, where drafts are verified, of verify; captured on padding only, largest size first."""

    def __init__(self, steps: Sequence[CapturedStep], max_batch: int, device: torch.device) -> None:
        self.sizes = padded_sizes(max_batch)
        self._steps = {step.mode: step for step in steps}
        tokens = max_batch * max(step.query_len for step in steps)
        self._input_ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._replays = {
            (step.mode, lanes): self._capture(step, lanes) for step in steps for lanes in reversed(self.sizes)
        }

    def has(self, mode: ForwardMode) -> bool:
        return mode in self._steps

    def lanes_for(self, batch: int) -> int:
        return next(size for size in self.sizes if size >= batch)

    def run(self, batch: ForwardBatch) -> Forwarded:
        """Results of a batch that is padded to a captured size; valid until the next run."""
        tokens = batch.input_ids.numel()
        self._input_ids[:tokens].copy_(batch.input_ids)
        self._positions[:tokens].copy_(batch.positions)
        self._steps[batch.mode].refill(batch)
        return self._replays[batch.mode, batch.size]()

    def _capture(self, step: CapturedStep, lanes: int) -> Callable[[], Forwarded]:
        tokens = lanes * step.query_len
        ids, positions = self._input_ids[:tokens], self._positions[:tokens]
        run = step.refill(step.padding(step.mode, lanes))
        if ids.device.type == "cpu":
            return lambda: run(ids, positions)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run(ids, positions)  # compiles kernels and creates handles outside the capture
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(ids, positions)

        def replay() -> Forwarded:
            graph.replay()
            return captured

        return replay
