"""How the small checkpoints are trained: initial weights, two optimizers, a curriculum of texts, swapped layers.

Embeddings start at a standard deviation of 1 and projections back into the
residual stream at a fifth of the usual size; Muon moves the hidden matrices and
AdamW the rest. Without these recall stalls far below the target.
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from suite.models.languages import LANGUAGES
from suite.models.layers import RMSNorm
from suite.models.routed import RoutedExperts

MUON_LR, ADAMW_LR = 1.5e-2, 3e-3
BACK_INTO_STREAM = ("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")
NOT_HIDDEN = (
    *("embed_tokens", "lm_head", "router", "mlp.gate.", "moe.gate.", "shared_expert_gate", "conv", "A_log", "dt_bias"),
    *("markov_head", "confidence_head"),
)
DECAY_STEPS = (1e-3, 3e-2)  # log decay per token of the first and of the last head of a recurrent layer


def initialise(model: nn.Module, seed: int) -> None:
    """Fill every parameter."""
    generator = torch.Generator().manual_seed(seed)
    outputs_first = {id(held.gate_up_proj) for held in model.modules() if isinstance(held, RoutedExperts)}
    outputs_first |= {id(held.down_proj) for held in model.modules() if isinstance(held, RoutedExperts)}
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks", "A_log")):
            value = torch.zeros(parameter.shape)
        else:
            # a matrix is [outputs, inputs]; of experts stacked before it, gpt-oss' are [inputs, outputs]
            inputs = parameter.shape[2 if id(parameter) in outputs_first else 1] if parameter.ndim > 1 else 1
            scale = 1.0 if "embed_tokens" in name else inputs**-0.5
            scale *= 0.2 if name.endswith(BACK_INTO_STREAM) else 1.0
            value = torch.randn(parameter.shape, generator=generator) * scale
        if name.endswith("dt_bias"):
            steps = torch.logspace(*map(math.log10, DECAY_STEPS), parameter.numel(), dtype=torch.float64)
            value = steps.expm1().log().float().view(parameter.shape)  # softplus(dt_bias) is the step
        parameter.data.copy_(value)
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.weight.data.fill_(1 - module.offset)


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
class Swap:
    """On `share` of a task's texts `layers` read what the next text of the task stored, not their own.

    The answer has to come through the other layers, and nothing tells the model so: where a layer merely falls
    silent, it learns to look elsewhere then and goes on leaning on that layer otherwise.
    """

    share: float
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """What one step sees: `tokens` tokens in texts of one length, shared among the tasks by `shares`.

    `stages`: (progress up to which, length). `swaps`: per task, which layers read another text.
    """

    tokens: int
    stages: tuple[tuple[float, int], ...]
    shares: dict[str, float]
    swaps: dict[str, Swap] = field(default_factory=dict)

    def length(self, progress: float) -> int:
        return next(length for until, length in self.stages if progress < until or until == self.stages[-1][0])


@dataclass(frozen=True)
class Batch:
    """ids, weight: [rows, length]; weight is each prediction's share of the loss.

    reads: int64 [layers, rows], the row whose stored keys, values or states a layer of a row reads.
    """

    ids: torch.Tensor
    weight: torch.Tensor
    reads: torch.Tensor


def most_questions(task: str, length: int) -> int:
    """How many questions a training text of `length` tokens asks at most."""
    return min(LANGUAGES[task].max_questions, max(1, length // 16) if task in ("recall", "sums", "hop") else 8)


def draw(plan: Plan, layers: int, length: int, seed: tuple[int, ...]) -> Batch:
    """One batch; the same arguments give the same batch."""
    rng = np.random.RandomState(seed)
    ids, weights, reads, first = [], [], [], 0
    for task, share in plan.shares.items():
        rows = max(1, round(plan.tokens / length * share))
        text = LANGUAGES[task].text(rng, rows, length, 1 + int(rng.random_sample() * most_questions(task, length)))
        ids.append(text.ids)
        weights.append(text.graded / max(1, text.graded.sum()))
        reads.append(first + _read_rows(rng, plan.swaps.get(task), layers, rows))
        first += rows
    return Batch(
        torch.from_numpy(np.concatenate(ids)),
        torch.from_numpy(np.concatenate(weights)).float(),
        torch.from_numpy(np.concatenate(reads, axis=1)),
    )


def _read_rows(rng: np.random.RandomState, swap: Swap | None, layers: int, rows: int) -> np.ndarray:
    """int64 [layers, rows]: each row's own number, or the next one's where its layer is swapped."""
    own = np.arange(rows)
    reads = np.tile(own, (layers, 1))
    if swap is not None:
        reads[list(swap.layers)] = np.where(rng.random_sample(rows) < swap.share, (own + 1) % rows, own)
    return reads


class Feed:
    """Batches drawn ahead by threads, so that a GPU does not wait for NumPy."""

    def __init__(self, plan: Plan, layers: int, seed: int, ahead: int = 8, threads: int = 4) -> None:
        self.plan, self.layers, self.seed, self.ahead = plan, layers, seed, ahead
        self.threads = ThreadPoolExecutor(threads)

    def batches(self, length: int, first_step: int) -> Iterator[Batch]:
        """Without end, from `first_step` on; what is drawn ahead when the caller stops is dropped."""
        step = first_step
        queue = []
        while True:
            while len(queue) < self.ahead:
                queue.append(self.threads.submit(draw, self.plan, self.layers, length, (self.seed, length, step)))
                step += 1
            yield queue.pop(0).result()
