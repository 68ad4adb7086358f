"""The simulated campaigns, in a reduced form: the rates that docs/statistics.md publishes are still these."""

import pytest

from suite.e2e.gate import campaign
from suite.e2e.gate.simulate import ALPHA
from suite.e2e.gate.statistics import clopper_pearson

FAST = [s for s in campaign.SETTINGS if "step" not in s.name and "run of" not in s.name]
CAMPAIGNS = 150


@pytest.mark.parametrize("setting", FAST, ids=lambda setting: setting.name)
def test_rates_are_not_worse_than_claimed(setting):
    without = campaign.count(setting, CAMPAIGNS, 0.0, 11)
    assert clopper_pearson(without["FAIL"], CAMPAIGNS)[0] <= ALPHA
    seen = campaign.count(setting, CAMPAIGNS, setting.effect, 12)["FAIL"]
    assert clopper_pearson(seen, CAMPAIGNS)[1] >= campaign.POWER
    if setting.margin:
        edge = campaign.count(setting, CAMPAIGNS, setting.margin, 13)["PASS"]
        assert clopper_pearson(edge, CAMPAIGNS)[0] <= ALPHA


def test_a_whole_run_sees_one_slow_cell():
    setting = next(s for s in campaign.SETTINGS if "run of" in s.name)
    assert campaign.count(setting, 5, 0.0, 14)["FAIL"] == 0
    assert campaign.count(setting, 5, setting.effect, 15)["FAIL"] == 5


def test_the_table_has_a_line_for_every_setting(monkeypatch):
    monkeypatch.setattr(campaign, "SETTINGS", campaign.SETTINGS[:1])
    lines = list(campaign.table(20))
    assert len(lines) == 3
    assert "0 of 20" in lines[2]
