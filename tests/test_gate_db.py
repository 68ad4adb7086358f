"""The gate on a real database: reading, deciding, keeping, making again, overriding, pinning, and the command."""

import sqlite3

import numpy as np
import pytest
import sqlalchemy as sa

from db import gate_inputs
from db.decision_models import Baseline, GateDecision, GateEvidence, NoiseModel
from db.decisions import control_alarms, find_decision, pin_release, store_override
from db.gate_reader import read_inputs
from db.session import open_db, writer
from suite.e2e.gate import service
from suite.e2e.gate.verdicts import GateRefusedError
from suite.errors import InputError
from tests.db_support import empty_postgres, postgres
from tests.gate_rig import BLOCKS, ITEMS, make_policy, store_run

POLICY = make_policy()


@pytest.fixture
def engine(tmp_path):
    engine = open_db(tmp_path / "results.db")
    yield engine
    engine.dispose()


def gate(engine, run=None, policy=POLICY):
    return service.run_gate(engine, run, policy)


def test_inputs_are_what_was_stored(engine):
    run = store_run(engine, replicate=True, diff=0.25, correct=np.arange(ITEMS) >= 7)
    inputs = read_inputs(engine, run)
    (cell,) = inputs.cells
    arms = {arm.name: arm for arm in cell.arms}
    assert set(arms) == {"static", "replicate", "unified"}
    assert cell.fields["workload"] == "tiny"
    assert cell.tasks == ("recall",) * ITEMS
    unified = arms["unified"]
    assert [key[1] for key in unified.planned] == [row.block for row in unified.rows] == list(range(BLOCKS))
    assert unified.rows[0].answers[0].count("0") == 7
    assert arms["static"].rows[0].answers[0].count("0") == 0
    assert [exact.effect for exact in unified.rows[0].exact] == [0.25]
    assert unified.rows[0].values["itl_ms"] != arms["static"].rows[0].values["itl_ms"]
    assert unified.rows[0].comparable_hash
    assert unified.rows[0].device_name == "a processor"
    sha, packed = gate_inputs.pack(inputs)
    assert gate_inputs.unpack(packed) == (sha, inputs)


@pytest.mark.parametrize(
    ("kinds", "verdict"),
    [({}, "PASS"), ({"slowdown": 0.06}, "FAIL"), ({"diff": 1e-6}, "FAIL"), ({"blocks": 5}, "INCONCLUSIVE"),
     ({"correct": np.arange(ITEMS) >= 12}, "FAIL")],
)  # fmt: skip
def test_a_run_is_decided_and_kept(engine, kinds, verdict):
    run = store_run(engine, **kinds)
    kept = gate(engine)
    assert (kept.verdict, kept.decision.run) == (verdict, run)
    with engine.connect() as connection:
        row = connection.execute(sa.select(GateDecision)).one()
        evidence = connection.execute(sa.select(GateEvidence)).all()
    assert (row.verdict, row.exit_code) == (verdict, {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 2}[verdict])
    assert {e.endpoint for e in evidence} == {"exact", "accuracy", "flips", "itl"}
    assert service.read_decision(engine, kept.id[:20]) == kept


def test_a_decision_is_made_again_bit_for_bit_even_after_more_rows(engine):
    store_run(engine, replicate=True)
    kept = gate(engine)
    store_run(engine, slowdown=0.2, seed=9)
    again = service.replay(engine, kept.id)
    assert (again.differences, again.engine_changed) == ((), False)
    assert again.stored == kept


def test_a_decision_that_was_touched_does_not_agree(engine, tmp_path):
    store_run(engine)
    kept = gate(engine)
    raw = sqlite3.connect(tmp_path / "results.db")
    with raw:
        (document,) = raw.execute("SELECT document FROM gate_decision").fetchone()
        effect = next(e for e in kept.decision.cells[0].evidence if e.endpoint == "itl").effect
        assert repr(effect) in document
        nudged = document.replace(repr(effect), repr(float(np.nextafter(effect, 1.0))))
        raw.execute("UPDATE gate_decision SET document = ?, engine_sha = 'other'", (nudged,))
    again = service.replay(engine, kept.id)
    assert len(again.differences) == 1
    assert "effect" in again.differences[0]
    assert again.engine_changed
    _, inputs = gate_inputs.unpack(find_decision(engine, kept.id).inputs)
    swapped = gate_inputs.pack(read_inputs(engine, store_run(engine, seed=5)))[1]
    assert gate_inputs.unpack(swapped)[1] != inputs
    with raw:
        raw.execute("UPDATE gate_decision SET inputs = ?", (swapped,))
    assert service.replay(engine, kept.id).differences[0].startswith("inputs: their sha256")
    raw.close()


def test_a_second_run_appends_and_never_replaces(engine):
    store_run(engine, slowdown=0.06, blocks=4)
    second = store_run(engine, seed=1, blocks=4)
    policy = make_policy()
    kept = gate(engine, second, policy)
    itl = next(e for e in kept.decision.cells[0].evidence if e.endpoint == "itl")
    assert itl.n == 8
    assert kept.verdict == "INCONCLUSIVE"  # the second try alone would have been four quiet blocks
    other = store_run(engine, seed=2, sha="another revision")
    assert gate(engine, other).decision.runs == (other,)
    elsewhere = store_run(engine, seed=3, suite="another matrix")
    assert gate(engine, elsewhere).decision.runs == (elsewhere,)


def test_a_first_look_that_failed_stands(engine):
    table = {"kind": "latency", "metric": "itl_ms", "margin": 0.02, "looks": [4, 8], "fail_when": "beyond_margin"}
    rule = {"select": {"family": "engine"}, "endpoints": ["exact", "itl"], "min_cells": 1}
    looks = make_policy(endpoints={"exact": {"kind": "exact"}, "itl": table}, cells=[rule])
    store_run(engine, slowdown=0.5, blocks=4)
    assert gate(engine, None, looks).verdict == "FAIL"
    store_run(engine, slowdown=-0.3, seed=1, blocks=4)
    assert gate(engine, None, looks).verdict == "FAIL"


def test_void_blocks_are_no_pairs(engine):
    store_run(engine, void=(1, 2))
    kept = gate(engine)
    cell = kept.decision.cells[0]
    assert (cell.blocks, cell.void_blocks) == (BLOCKS - 2, 2)
    assert kept.verdict == "INCONCLUSIVE"


def test_noise_and_controls_are_kept(engine):
    store_run(engine, replicate=True)
    kept = gate(engine)
    noise = {found.metric: found for found in kept.decision.noise}
    assert noise["itl_ms"].spread == pytest.approx(0.003 * 2**0.5, rel=0.6)
    assert noise["answers"].spread == 0.0
    with engine.connect() as connection:
        assert len(connection.execute(sa.select(NoiseModel)).all()) == 2
    tests, alarms = control_alarms(engine)
    assert (tests, alarms) == (4, 0)


def test_what_is_refused_is_not_kept(engine, tmp_path):
    with pytest.raises(InputError, match="run"):
        gate(engine)
    store_run(engine, state="running")
    with pytest.raises(GateRefusedError, match="still running"):
        gate(engine)
    empty = store_run(engine, blocks=0)
    with pytest.raises(GateRefusedError, match="measured nothing"):
        gate(engine, empty, POLICY)
    planted = store_run(engine, plants=("read_skips_translation",))
    with pytest.raises(InputError, match="without planted faults"):
        gate(engine, planted)
    whole = store_run(engine)
    assert gate(engine, whole).decision.runs == (empty, whole)  # a planted run appends to nothing
    raw = sqlite3.connect(tmp_path / "results.db")
    with raw:
        raw.execute("UPDATE cell_run SET started_at = '2026-12-01T00:00:00' WHERE run_id = ?", (whole,))
    raw.close()
    with pytest.raises(InputError, match=r"started_at.*offset"):
        gate(engine, whole)
    with engine.connect() as connection:
        assert len(connection.execute(sa.select(GateDecision)).all()) == 1


@pytest.mark.parametrize(("status", "passes"), [("wrong", True), ("passed", False)])
def test_planted_rows_are_the_engines_smoke_set(engine, status, passes):
    wrong = {"status": "wrong", "reason_code": "logits_differ", "reason": "x", "metrics": {}, "samples": ()}
    store_run(engine, plants=("read_skips_translation",), blocks=1, changes=wrong if status == "wrong" else None)
    run = store_run(engine)
    policy = make_policy(smoke="data")
    if passes:
        kept = gate(engine, run, policy)
        assert kept.verdict == "PASS"
        assert kept.decision.smoke.planted > 10
    else:
        with pytest.raises(GateRefusedError, match="read_skips_translation ended as passed"):
            gate(engine, run, policy)


def test_an_override_needs_a_name_a_reason_and_something_to_override(engine):
    store_run(engine, slowdown=0.06)
    failed = gate(engine)
    for by, reason in (("", "why"), (" ", "why"), ("who", "")):
        with pytest.raises(InputError):
            store_override(engine, failed.id, by, reason)
    kept = service.read_decision(engine, store_override(engine, failed.id, "Ada", "known and wanted"))
    assert (kept.verdict, kept.exit_code, kept.supersedes, kept.override_by) == ("PASS", 0, failed.id, "Ada")
    assert kept.decision.verdict == "FAIL"
    assert "Ada overrode FAIL: known and wanted" in kept.reason
    with pytest.raises(InputError, match="supersedes"):
        store_override(engine, failed.id, "Bob", "me too")
    with pytest.raises(InputError, match="not PASS already"):
        store_override(engine, kept.id, "Bob", "me too")
    assert service.replay(engine, kept.id).differences == ()
    with pytest.raises(sa.exc.IntegrityError), writer(engine).begin() as connection:
        connection.execute(sa.update(GateDecision).where(GateDecision.id == kept.id).values(override_reason=None))


def test_a_pinned_release_and_its_nights(engine):
    history = {"kind": "history", "metric": "itl_ms", "alpha": 0.01, "min_nights": 6, "window": 30, "recent": 3}
    policy = make_policy(
        endpoints={"exact": {"kind": "exact"}, "trend": history},
        cells=[{"select": {"family": "engine"}, "endpoints": ["exact", "trend"], "min_cells": 1}],
    )
    release = store_run(engine, sha="release")
    with pytest.raises(InputError, match="name and a reason"):
        pin_release(engine, release, "Ada", "")
    assert pin_release(engine, release, "Ada", "v1") == 1
    for night in range(9):
        last = store_run(engine, sha=f"night {night}", seed=10 + night, blocks=2, slowdown=0.06 if night >= 4 else 0.0)
    inputs = read_inputs(engine, last, ["itl_ms"], 30)
    (series,) = inputs.cells[0].series
    assert len(series.values) == 10
    assert series.pinned_run == release
    assert series.values[-1] == pytest.approx(np.log(1.06), abs=0.01)
    kept = gate(engine, last, policy)
    assert kept.verdict == "FAIL"
    assert "crept away" in kept.reason or "stepped up" in kept.reason
    assert service.replay(engine, kept.id).differences == ()
    pin_release(engine, last, "Ada", "v2: the newest pin counts")
    with pytest.raises(InputError, match="baseline"):
        gate(engine, last, policy)
    with engine.connect() as connection:
        assert len(connection.execute(sa.select(Baseline)).all()) == 2


def test_postgresql_keeps_the_same_decision(engine):
    with postgres() as url:
        empty_postgres(url)
        server = open_db(url)
        store_run(server, replicate=True, slowdown=0.06)
        kept = gate(server)
        assert kept.verdict == "FAIL"
        assert service.replay(server, kept.id).differences == ()
        overridden = service.read_decision(server, store_override(server, kept.id, "Ada", "why"))
        assert overridden.exit_code == 0
        server.dispose()
