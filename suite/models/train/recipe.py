"""How the small checkpoints are trained: initial weights, two optimizers, a curriculum of texts, dropped layers.

Embeddings start at a standard deviation of 1 and projections back into the
residual stream at a fifth of the usual size; Muon moves the hidden matrices and
AdamW the rest. Without these recall stalls far below the target.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from suite.models.languages import LANGUAGES

MUON_LR, ADAMW_LR = 1.5e-2, 3e-3
BACK_INTO_STREAM = ("o_proj.weight", "down_proj")
NOT_HIDDEN = ("embed_tokens", "lm_head", "router")


def initialise(model: nn.Module, seed: int) -> None:
    """Fill every parameter."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            value = torch.ones(parameter.shape)
        elif name.endswith(("bias", "sinks")):
            value = torch.zeros(parameter.shape)
        else:
            # experts are stored [experts, inputs, outputs], everything else [outputs, inputs]
            inputs = parameter.shape[1]
            scale = 1.0 if "embed_tokens" in name else inputs**-0.5
            scale *= 0.2 if name.endswith(BACK_INTO_STREAM) else 1.0
            value = torch.randn(parameter.shape, generator=generator) * scale
        parameter.data.copy_(value)


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon on the hidden matrices, AdamW on everything else. Each group remembers its peak rate as `peak_lr`."""
    hidden, rest = [], []
    for name, parameter in model.named_parameters():
        is_hidden = parameter.ndim == 2 and not any(part in name for part in NOT_HIDDEN)
        (hidden if is_hidden else rest).append(parameter)
    made = [
        torch.optim.Muon(hidden, lr=MUON_LR),
        torch.optim.AdamW(rest, lr=ADAMW_LR, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    for optimizer in made:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return made


def set_rate(made: list[torch.optim.Optimizer], progress: float) -> None:
    """Rise over the first 2 %, hold, and fall to nothing over the last half. progress: 0 to 1."""
    share = min(1.0, progress / 0.02 + 0.01, max(0.0, 2 * (1 - progress)))
    for optimizer in made:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * share


@dataclass(frozen=True)
class Plan:
    """What one step sees: `tokens` tokens in texts of one length, shared among the tasks by `shares`.

    `stages`: (progress up to which, length). `drop_one_full`: the share of texts in which one full layer, at
    random, says nothing, so that the answer has to come through a window layer and the other full one.
    `drop_all_full`: the share of `local` texts in which none says anything.
    """

    tokens: int
    stages: tuple[tuple[float, int], ...]
    shares: dict[str, float]
    drop_one_full: float
    drop_all_full: float

    def length(self, progress: float) -> int:
        return next(length for until, length in self.stages if progress < until or until == self.stages[-1][0])


@dataclass(frozen=True)
class Batch:
    """ids, weight: [rows, length]; weight is each prediction's share of the loss. keep: [layers, rows]."""

    ids: torch.Tensor
    weight: torch.Tensor
    keep: torch.Tensor


def draw(plan: Plan, windows: tuple[int | None, ...], length: int, seed: tuple[int, ...]) -> Batch:
    """One batch; the same arguments give the same batch."""
    rng = np.random.RandomState(seed)
    ids, weights, keeps = [], [], []
    for task, share in plan.shares.items():
        rows = max(1, round(plan.tokens / length * share))
        most = {"recall": max(1, length // 16), "needle": 4, "copy": 1, "local": 8}[task]
        text = LANGUAGES[task].text(rng, rows, length, 1 + int(rng.random_sample() * most))
        ids.append(text.ids)
        weights.append(text.graded / max(1, text.graded.sum()))
        keeps.append(_kept_layers(rng, plan, windows, task, rows))
    keep = np.concatenate(keeps, axis=1)
    return Batch(
        torch.from_numpy(np.concatenate(ids)),
        torch.from_numpy(np.concatenate(weights)).float(),
        torch.from_numpy(keep).float(),
    )


def _kept_layers(
    rng: np.random.RandomState, plan: Plan, windows: tuple[int | None, ...], task: str, rows: int
) -> np.ndarray:
    full = np.array([index for index, window in enumerate(windows) if window is None])
    keep = np.ones((len(windows), rows), dtype=bool)
    if task == "local":
        keep[full] = rng.random_sample(rows) >= plan.drop_all_full
    else:
        silent = full[(rng.random_sample(rows) * len(full)).astype(np.int64)]
        keep[silent, np.arange(rows)] = rng.random_sample(rows) >= plan.drop_one_full
    return keep


class Feed:
    """Batches drawn ahead by threads, so that a GPU does not wait for NumPy."""

    def __init__(
        self, plan: Plan, windows: tuple[int | None, ...], seed: int, ahead: int = 8, threads: int = 4
    ) -> None:
        self.plan, self.windows, self.seed, self.ahead = plan, windows, seed, ahead
        self.threads = ThreadPoolExecutor(threads)

    def batches(self, length: int, first_step: int) -> Iterator[Batch]:
        """Without end, from `first_step` on; what is drawn ahead when the caller stops is dropped."""
        step = first_step
        queue = []
        while True:
            while len(queue) < self.ahead:
                queue.append(self.threads.submit(draw, self.plan, self.windows, length, (self.seed, length, step)))
                step += 1
            yield queue.pop(0).result()
