"""Clean twins over seeds: each round has its own, an alarm is named, and what draws nothing does not count."""

import pytest

from suite.e2e.faults.detection.registry import FAULTS
from suite.e2e.faults.detection.twins import compare_twins, draws
from suite.e2e.faults.fault import Signal
from suite.errors import InputError, InvariantError


def quiet(setting):
    assert setting.seed >= 0
    yield from ()


def fixed(setting):
    yield from ()


def odd(setting):
    if setting.seed % 3 == 2:
        yield Signal(name="here.seen", text=f"seed {setting.seed}")


def test_rounds_are_whole_and_each_has_a_seed_of_its_own():
    seen = []

    def keeps(setting):
        seen.append(setting.seed)
        yield from ()

    found = compare_twins(5, [quiet, keeps, fixed])
    assert (found.comparisons, found.scenarios, found.seeds, found.alarms) == (6, 2, 3, [])
    assert seen == [0, 1, 2, 3]  # 0: whether it draws


def test_an_alarm_is_named_by_seed_and_signal():
    told = []
    found = compare_twins(9, [odd], told.append)
    assert [(alarm.seed, alarm.signals[0].name) for alarm in found.alarms] == [
        (2, "here.seen"),
        (5, "here.seen"),
        (8, "here.seen"),
    ]
    assert any("here.seen: seed 5" in text for text in told)


def test_what_draws_nothing_does_not_count():
    assert (draws(quiet), draws(fixed)) == (True, False)
    with pytest.raises(InvariantError, match="draw from their seed 0"):
        compare_twins(1, [fixed])
    with pytest.raises(InputError, match="twins: got 0"):
        compare_twins(0, [quiet])


def test_the_pools_own_scenario_draws_and_is_quiet_at_other_seeds():
    scenario = FAULTS["read_skips_translation"].scenario
    assert draws(scenario)
    assert compare_twins(2, [scenario]).alarms == []
