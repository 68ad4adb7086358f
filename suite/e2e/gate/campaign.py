"""How often the gate is wrong, measured: thousands of simulated campaigns through the code that decides.

    python -m suite.e2e.gate.campaign [--campaigns 2000]

Every endpoint is asked of campaigns without a difference (A/A), with a difference of exactly the margin,
and with the effect that it claims to see. The table goes into docs/statistics.md. Seeds are fixed.
"""

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from suite.e2e.gate.simulate import (
    Simulate,
    accept_at,
    accuracy_at,
    creep_at,
    flips_at,
    latency_at,
    positions_at,
    step_at,
    whole_at,
)
from suite.e2e.gate.statistics import SEED, clopper_pearson

POWER = 0.9


class Setting(NamedTuple):
    """One endpoint in one situation. `margin` is 0 for an alarm; `effect` is what it must see, in `unit`."""

    name: str
    simulate: Simulate
    margin: float
    effect: float
    unit: str
    share: float = 1.0  # of the campaigns with an effect, where one takes long
    share_without: float = 1.0  # of the A/A campaigns, likewise


class Rates(NamedTuple):
    """What a setting came to; counts of n campaigns each."""

    setting: Setting
    n: int
    n_without: int
    false_alarms: int
    passes: int
    false_passes: int
    seen: int
    smallest: float


MARGIN_2 = {"margin": 0.02, "effect": 0.04, "unit": "of time"}
SETTINGS = (
    Setting("latency, 8 blocks, tau 0.75 %, margin 2 %", latency_at(0.0075, 0.02, (8,)), **MARGIN_2),
    Setting("latency, 16 blocks, tau 1.2 %, margin 2 %", latency_at(0.012, 0.02, (16,)), **MARGIN_2),
    Setting("latency, the same with heavy tails", latency_at(0.012, 0.02, (16,), heavy=True), **MARGIN_2),
    Setting("latency, looks 4/8/16/32, tau 1.5 %, margin 2 %", latency_at(0.015, 0.02, (4, 8, 16, 32)), **MARGIN_2),
    Setting("latency, 80 blocks, tau 1.5 %, margin 0.6 %", latency_at(0.015, 0.006, (80,)), 0.006, 0.012, "of time"),
    Setting(
        "accuracy, 1,319 questions, 5 % flip, margin 2 points",
        accuracy_at(1319, 0.05, 0.02),
        0.02,
        0.02,
        "of questions",
    ),
    Setting("flips, 1,319 questions, 4 % flip by themselves", flips_at(1319, 0.04), 0.0, 0.03, "of questions"),
    Setting("accept length, 80 prompts, noise 0.3, margin 6 %", accept_at(80, 0.3, 0.06), 0.06, 0.12, "of length"),
    Setting("positions, 80 prompts of 40 drafts", positions_at(80, 40), 0.0, 0.09, "of drafts at the last position"),
    Setting("history, a step in the last 7 of 60 nights", step_at(60), 0.0, 4.0, "nightly SD", share=0.05),
    Setting("a run of 4 cells, 4 endpoints each", whole_at(4), 0.0, 0.04, "of one cell's time", 0.05, 0.1),
    Setting("history, creep over 365 nights", creep_at(365), 0.0, 5.0, "nightly SD"),
)


def count(setting: Setting, n: int, effect: float, seed: int) -> Counter[str]:
    """How often the endpoint says what, over n campaigns."""
    random = np.random.default_rng([SEED, seed])
    return Counter(setting.simulate(random, effect).verdict for _ in range(n))


def smallest_effect(setting: Setting, n: int) -> float:
    """The smallest effect that ends as FAIL in 9 of 10 campaigns, by bisection on the same seeds."""
    low, high = 0.0, 2.0 * setting.effect
    for _ in range(6):
        middle = (low + high) / 2
        low, high = (low, middle) if count(setting, n, middle, 4)["FAIL"] >= POWER * n else (middle, high)
    return high


def measure(setting: Setting, campaigns: int) -> Rates:
    """All rates of one setting. Each over its share of the campaigns."""
    n = max(20, int(campaigns * setting.share))
    n_without = max(20, int(campaigns * setting.share_without))
    without = count(setting, n_without, 0.0, 1)
    return Rates(
        setting,
        n,
        n_without,
        false_alarms=without["FAIL"],
        passes=without["PASS"],  # an alarm never passes, it stays quiet
        false_passes=count(setting, n, setting.margin, 2)["PASS"] if setting.margin else 0,
        seen=count(setting, n, setting.effect, 3)["FAIL"],
        smallest=smallest_effect(setting, max(20, n // 20)),
    )


def table(campaigns: int) -> Iterator[str]:
    """The table, line by line, as it is measured."""
    yield "| endpoint | A/A fails (at most) | A/A passes | passes at the margin | effect | seen | 9 in 10 see |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for setting in SETTINGS:
        rates = measure(setting, campaigns)
        alarm = clopper_pearson(rates.false_alarms, rates.n_without)[1]
        low, high = clopper_pearson(rates.false_passes, rates.n)
        edge = f"{rates.false_passes / rates.n:.2%} ({low:.2%} to {high:.2%})" if setting.margin else "-"
        passed = f"{rates.passes / rates.n_without:.1%}" if rates.passes else "-"
        yield (
            f"| {setting.name} | {rates.false_alarms} of {rates.n_without} ({alarm:.2%}) | {passed} | {edge}"
            f" | {shown(setting, setting.effect)} {setting.unit} | {rates.seen / rates.n:.1%}"
            f" | {shown(setting, rates.smallest)} |"
        )


def shown(setting: Setting, effect: float) -> str:
    return f"{effect:.1f}" if setting.unit == "nightly SD" else f"{effect:.2%}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulated campaigns through the code that decides.")
    parser.add_argument("--campaigns", type=int, default=2000, help="A/A campaigns per endpoint (2000)")
    campaigns = parser.parse_args().campaigns
    start = time.monotonic()
    for line in table(campaigns):
        print(line, flush=True)
    print(f"\n{campaigns} campaigns per endpoint, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
