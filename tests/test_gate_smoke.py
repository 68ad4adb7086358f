"""When the gate does not decide: inputs that nobody may judge by, and a smoke set that was missed."""

import numpy as np
import pytest
from msgspec.structs import replace

from db.gate_inputs import PlantedRow
from suite.e2e.gate.decide import decide
from suite.e2e.gate.policy import load_policy
from suite.e2e.gate.smoke import smoke_set
from suite.e2e.gate.synthetic import series_of_values
from suite.e2e.gate.verdicts import GateRefusedError
from suite.errors import InputError
from tests.gate_rig import make_policy, policy_table
from tests.test_gate_decide import POLICY, clean, no_smoke, say
from tests.test_gate_policy import ROOT


@pytest.mark.parametrize("name", ["merge", "nightly"])
def test_the_shipped_policies_see_every_fault(name):
    policy = load_policy(ROOT / "gates" / f"{name}.toml")
    smoke = smoke_set(policy, clean())
    assert smoke.missed == ()
    assert smoke.planted > 20


def test_a_policy_that_sees_nothing_may_not_decide():
    blind = make_policy(
        smoke="required",
        endpoints={"itl": {**policy_table()["endpoints"]["itl"], "alpha": 1e-12}},
        cells=[{"select": {"family": "engine"}, "endpoints": ["itl"], "min_cells": 1}],
    )
    with pytest.raises(GateRefusedError, match=r"missed cells\[0\]") as caught:
        decide(blind, clean(blind), smoke_set)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(("status", "missed"), [("wrong", 0), ("passed", 1), ("crashed", 1)])
def test_faults_planted_into_the_engine_must_be_caught(status, missed):
    inputs = replace(clean(), planted=(PlantedRow(fault="read_skips_translation", run="r", status=status),))
    smoke = smoke_set(POLICY, inputs)
    assert len(smoke.missed) == missed
    if missed:
        with pytest.raises(GateRefusedError, match="read_skips_translation"):
            decide(replace(POLICY, smoke="required"), inputs, smoke_set)


def test_a_required_smoke_set_must_plant_something():
    with pytest.raises(GateRefusedError, match="no fault was planted"):
        decide(replace(POLICY, smoke="required"), clean(), no_smoke)


def test_what_is_refused_outright():
    inputs = clean()
    with pytest.raises(GateRefusedError, match="still running"):
        say(replace(inputs, state="running"))
    with pytest.raises(GateRefusedError, match="measured nothing"):
        say(replace(inputs, cells=()))
    cell = inputs.cells[0]
    planted = replace(cell.arms[2], plants=("read_skips_translation",))
    with pytest.raises(InputError, match="without planted faults") as caught:
        say(replace(inputs, cells=(replace(cell, arms=(*cell.arms, planted)),)))
    assert caught.value.exit_code == 4
    same = replace(cell.arms[2], rows=cell.arms[0].rows)
    with pytest.raises(InputError, match="baseline"):
        say(replace(inputs, cells=(replace(cell, arms=(*cell.arms[:2], same)),)))
    pinned = replace(series_of_values(np.zeros(9)), pinned=0.0, pinned_run=inputs.run)
    with pytest.raises(InputError, match="baseline"):
        say(replace(inputs, cells=(replace(cell, series=(pinned,)),)))
