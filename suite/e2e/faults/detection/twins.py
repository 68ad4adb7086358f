"""Clean twins over many seeds: how often a detector fires where nothing is planted.

Only scenarios that draw from their seed count: the others would be the same comparison again and again.
"""

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from suite.e2e.faults.detection.registry import FAULTS
from suite.e2e.faults.detection.run import observe
from suite.e2e.faults.fault import Scenario, Setting, Signal
from suite.errors import InputError, InvariantError


class SeedWatch(Setting):
    """A setting that knows whether its seed was asked for."""

    def __getattribute__(self, name: str) -> Any:
        if name == "seed":
            object.__setattr__(self, "was_asked", True)
        return super().__getattribute__(name)


class Alarm(NamedTuple):
    """A clean twin in which a signal fired. `faults`: those that the scenario is the twin of."""

    faults: list[str]
    seed: int
    signals: list[Signal]


class Twins(NamedTuple):
    """What came of the comparisons: how many there were, over how many scenarios and seeds, and every alarm."""

    comparisons: int
    scenarios: int
    seeds: int
    alarms: list[Alarm]


def draws(scenario: Scenario) -> bool:
    """Whether `scenario` asks for its seed."""
    watch = SeedWatch(seed=0)
    observe(scenario, watch)
    return "was_asked" in vars(watch)


def compare_twins(
    count: int, scenarios: Iterable[Scenario] | None = None, told: Callable[[str], None] = lambda text: None
) -> Twins:
    """At least `count` clean comparisons: whole rounds of the scenarios that draw, each round with a seed of its own.

    InputError for a count under 1, InvariantError when no scenario draws.
    """
    if count < 1:
        raise InputError("twins", count, "at least 1 comparison")
    known = dict.fromkeys(fault.scenario for fault in FAULTS.values()) if scenarios is None else scenarios
    drawn = [scenario for scenario in known if draws(scenario)]
    if not drawn:
        raise InvariantError("scenarios that draw from their seed 0 != at least 1")
    alarms, done, started = [], 0, time.perf_counter()
    for seed in itertools.count(1):
        for scenario in drawn:
            if signals := observe(scenario, Setting(seed=seed)):
                faults = [fault.id for fault in FAULTS.values() if fault.scenario is scenario]
                alarms.append(Alarm(faults, seed, signals))
                told(f"seed {seed}, twin of {', '.join(faults)}: {signals[0].name}: {signals[0].text}")
            done += 1
        told(f"{done} clean comparisons, {len(alarms)} alarms in {time.perf_counter() - started:.0f} s")
        if done >= count:
            break
    return Twins(done, len(drawn), seed, alarms)
