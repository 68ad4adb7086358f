"""The gate asks the engine's smoke set before it decides, in a child; here a fake one that prints prepared rows."""

import json
import sys

import pytest
import sqlalchemy as sa

from db.decision_models import GateDecision
from db.session import open_db
from suite.e2e.faults import child
from suite.e2e.gate import engine_smoke, service
from suite.e2e.gate.verdicts import EngineFault, GateRefusedError
from suite.errors import KvproofError
from tests.gate_rig import make_policy, store_run

CAUGHT = {"fault": "a", "caught": True, "clean_twin_passed": True, "first_signal": "judge.outputs_differ: 3", "by": []}
MISSED = {**CAUGHT, "fault": "b", "caught": False, "first_signal": None}
ALARMED = {**CAUGHT, "fault": "c", "clean_twin_passed": False}
REQUIRED = make_policy(smoke="required")


@pytest.fixture
def engine(tmp_path):
    engine = open_db(tmp_path / "results.db")
    store_run(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def says(monkeypatch, tmp_path):
    """Replaces the child by one that prints these rows and ends with that exit code; returns what it was asked."""
    asked = tmp_path / "asked"

    def become(*rows, code=0, text=None, seconds=0):
        out = "\n".join(map(json.dumps, rows)) if text is None else text
        source = f"""import sys, time
with open({str(asked)!r}, 'a') as file: print(*sys.argv[1:], file=file)
time.sleep({seconds})
print({out!r}, end="")
sys.exit({code})"""
        monkeypatch.setattr(child, "COMMAND", (sys.executable, "-c", source))
        return asked

    return become


def decisions(engine):
    with engine.connect() as connection:
        return connection.scalar(sa.select(sa.func.count()).select_from(GateDecision))


def test_what_the_engine_saw_is_kept_and_not_run_again_by_a_replay(engine, says):
    asked = says(CAUGHT)
    kept = service.run_gate(engine, None, REQUIRED)
    assert kept.verdict == "PASS"
    smoke = kept.decision.smoke
    seen = EngineFault(fault="a", caught=True, clean_twin_passed=True, first_signal="judge.outputs_differ: 3")
    assert (smoke.engine, smoke.missed) == ((seen,), ())
    own = service.run_gate(engine, None, make_policy(smoke="data")).decision.smoke
    assert smoke.planted == own.planted + 1
    assert own.engine == ()
    says(MISSED, code=1)  # a replay that ran it again would be refused
    assert service.replay(engine, kept.id).differences == ()
    assert asked.read_text().split() == ["--smoke"]


@pytest.mark.parametrize("rows", [(CAUGHT, MISSED), (ALARMED,)], ids=["missed", "twin"])
def test_a_fault_that_is_missed_and_a_twin_that_is_not_silent_refuse_the_gate(engine, says, rows):
    says(*rows, code=1)
    with pytest.raises(GateRefusedError, match=r"missed (b, planted into the engine|the clean twin of c)") as caught:
        service.run_gate(engine, None, REQUIRED)
    assert caught.value.exit_code == 3
    assert decisions(engine) == 0


@pytest.mark.parametrize(
    ("becomes", "reason"),
    [
        ({"code": 7}, "ended with exit code 7"),
        ({"code": -9}, "ended with exit code"),
        ({}, "no fault was planted"),
        ({"text": "Traceback"}, "what is no row"),
        ({"text": "{}"}, "KeyError"),
        ({"text": json.dumps({**CAUGHT, "caught": "yes"})}, "ValidationError"),
    ],
)
def test_a_child_that_says_nothing_to_rely_on_refuses_the_gate(engine, says, becomes, reason):
    says(**becomes)
    with pytest.raises(GateRefusedError, match=reason):
        service.run_gate(engine, None, REQUIRED)
    assert decisions(engine) == 0


def test_a_child_that_hangs_is_ended(engine, says, monkeypatch):
    says(CAUGHT, seconds=60)
    monkeypatch.setattr(engine_smoke, "TIMEOUT_S", 0.2)
    with pytest.raises(GateRefusedError, match=r"not ended after 0\.2 s"):
        service.run_gate(engine, None, REQUIRED)


@pytest.mark.parametrize("smoke", ["data", "not_required"])
def test_only_a_policy_leaves_it_out(engine, says, smoke):
    asked = says(MISSED, code=1)
    assert service.run_gate(engine, None, make_policy(smoke=smoke)).verdict == "PASS"
    assert not asked.exists()


def test_it_is_not_run_for_what_is_refused_anyway(engine, says):
    asked = says(CAUGHT)
    run = store_run(engine, state="running")
    with pytest.raises(GateRefusedError, match="still running"):
        service.run_gate(engine, run, REQUIRED)
    assert not asked.exists()


def test_the_child_is_asked_with_json_and_an_error_of_its_own_is_ours():
    assert child.COMMAND[1:] == ("-m", "suite.e2e.faults", "--json")
    with pytest.raises(KvproofError, match="exit code 4"):
        child.detection_rows("--kind", "adressing")
