"""Faults with a size: how often a detector sees them. `python -m suite.e2e.faults.detection.graded` prints the table.

Slowdowns, flipped answers and accept lengths are simulated, with the noise that is stated, and judged by the gate's
own tests at 5 %; swapped rows are written by the rig and judged by exactness. Size 0 is the false-alarm rate.
"""

import argparse
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from suite.e2e.faults.detection.layers import EAGER, layers
from suite.e2e.faults.detection.run import observe
from suite.e2e.faults.fault import Fault, Setting
from suite.e2e.faults.seams import planted
from suite.e2e.gate.accept import Counters, accept_loss
from suite.e2e.gate.accuracy import Flips, mcnemar_worse_p
from suite.e2e.gate.latency import t_test
from suite.e2e.gate.statistics import clopper_pearson

ALPHA = 0.05
BLOCKS, TAU = 16, 0.01  # of log ratios, 1 % between blocks: what random placement leaves
QUESTIONS, DISCORDANCE = 1319, 0.02
PROMPTS, PASSES, ACCEPT_LENGTH, PROMPT_SD = 160, 40, 3.5, 0.3
Trial = Callable[[float, np.random.Generator], bool]


def slower(size: float, random: np.random.Generator) -> bool:
    """One arm slower by `size`: one-sided paired t over blocks."""
    return t_test(math.log1p(size) + random.normal(0, TAU, BLOCKS), 0.0, ALPHA).p_beyond < ALPHA


def flipped(size: float, random: np.random.Generator) -> bool:
    """`size` right answers turned wrong, beside flips that go both ways: McNemar's exact test."""
    lost, won = random.binomial(QUESTIONS, DISCORDANCE / 2, 2)
    return mcnemar_worse_p(Flips(int(lost + size), int(won), QUESTIONS)) < ALPHA


def less_accepted(size: float, random: np.random.Generator) -> bool:
    """Accept length lower by `size`: the cluster bootstrap over prompts."""
    own = np.maximum(1.0, random.normal(ACCEPT_LENGTH, PROMPT_SD, PROMPTS))
    passes = np.full(PROMPTS, float(PASSES))
    noise = random.normal(0, PROMPT_SD / math.sqrt(PASSES), (2, PROMPTS))
    static, candidate = ((own + noise[0]) * PASSES, np.maximum(1.0, own - size + noise[1]) * PASSES)
    return accept_loss(Counters(static, passes), Counters(candidate, passes)).p_beyond(0.0) < ALPHA


def swapped(size: float, random: np.random.Generator) -> bool:
    """A share `size` of new rows stored at the row before: bit-exactness of the two pools."""
    drawn = torch.Generator().manual_seed(int(random.integers(2**31)))

    def swap(own: Any) -> Any:
        def write(k_view: Any, v_view: Any, ids: torch.Tensor, *rest: Any) -> None:
            off = (torch.rand(ids.shape, generator=drawn) < size) & (ids > 0)
            own(k_view, v_view, torch.where(off, ids - 1, ids), *rest)

        return write

    scenario = layers(EAGER)
    fault = Fault(
        id="rows_swapped",
        kind="addressing",
        seam="suite.kernels.pools:write_kv",
        text="rows stored at the row before",
        substitute=swap,
        scenario=scenario,
        signals=("judge.outputs_differ",),
    )
    with planted(fault):
        return any(signal.name in fault.signals for signal in observe(scenario, Setting()))


GRADES: tuple[tuple[str, Trial, tuple[float, ...], int], ...] = (
    (f"slowdown of one arm, {BLOCKS} blocks of SD {TAU:.0%}", slower, (0.0, 0.005, 0.01, 0.02, 0.05), 1000),
    (f"right answers lost, of {QUESTIONS} at {DISCORDANCE:.0%} flips", flipped, (0, 1, 5, 10, 20), 1000),
    (f"accept length {ACCEPT_LENGTH} lowered, {PROMPTS} prompts", less_accepted, (0.0, 0.02, 0.05, 0.1, 1.0), 200),
    ("share of new rows swapped, one rig run", swapped, (0.0, 1e-4, 1e-3, 1e-2, 1e-1), 20),
)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--share", type=float, default=1.0, help="of the repeats")
    asked = parser.parse_args(arguments)
    print("| fault | size | seen | of | 95 % interval |\n|---|---|---|---|---|")
    for name, trial, sizes, repeats in GRADES:
        for size in sizes:
            random = np.random.default_rng((asked.seed, sizes.index(size)))
            n = max(2, int(repeats * asked.share))
            seen = sum(trial(size, random) for _ in range(n))
            low, high = clopper_pearson(seen, n)
            print(f"| {name} | {size:g} | {seen} | {n} | {low:.3f} to {high:.3f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
