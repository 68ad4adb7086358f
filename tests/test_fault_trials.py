"""Stored detection runs: every row whole, what a database refuses, and what the stored runs came to."""

import json

import pytest
import sqlalchemy as sa

from db.fault_models import FaultTrial
from db.fault_trials import detections, store_trials
from db.keys import utc_now
from db.session import open_db
from suite import cli, cli_faults
from suite.errors import InputError
from tests.gate_rig import REVISION


def row(fault, **changes):
    fields = {
        "fault": fault,
        "kind": "state",
        "caught": True,
        "by": ["judge.outputs_differ", "kernel.inaccurate"],
        "first_signal": "judge.outputs_differ: 3 of 9",
        "gpu_seconds": 0.0,
        "clean_twin_passed": True,
        "seconds": 0.25,
        "seam": "suite.x:Y.z",
        "text": "a mistake",
        "expected": ["judge.outputs_differ"],
        "severity": 2.0,
    }
    return fields | changes


CAUGHT = row("a")
MISSED = row("b", caught=False, by=[], first_signal=None, severity=None, clean_twin_passed=False)


@pytest.fixture
def engine(tmp_path):
    engine = open_db(tmp_path / "results.db")
    yield engine
    engine.dispose()


def test_every_row_is_kept_whole(engine):
    started = utc_now()
    key = store_trials(engine, [CAUGHT, MISSED], REVISION, started, device="cuda", seed=7, fresh=True)
    with engine.connect() as connection:
        a, b = connection.execute(sa.select(FaultTrial).order_by(FaultTrial.fault)).all()
    assert (a.detection_id, a.started_at, a.device, a.seed, a.fresh) == (key, started, "cuda", 7, True)
    assert (a.fault, a.kind, a.seam, a.size, a.expected) == ("a", "state", "suite.x:Y.z", 2.0, ["judge.outputs_differ"])
    assert (a.signals, a.first_signal, a.caught) == (CAUGHT["by"], CAUGHT["first_signal"], True)
    assert (a.clean_twin_passed, a.seconds, a.gpu_seconds) == (True, 0.25, 0.0)
    assert (b.caught, b.first_signal, b.size, b.signals, b.clean_twin_passed) == (False, None, None, [], False)


def test_what_stored_runs_came_to_oldest_first(engine):
    first = store_trials(engine, [CAUGHT, MISSED], REVISION, utc_now())
    second = store_trials(engine, [CAUGHT], REVISION, utc_now(), fresh=True)
    old, new = detections(engine)
    assert (old["detection"], old["planted"], old["caught"], old["clean_twins_failed"]) == (first, 2, 1, 1)
    assert (old["missed"], old["sha"], old["fresh"]) == (["b"], REVISION.sha, False)
    assert (new["detection"], new["planted"], new["missed"], new["fresh"]) == (second, 1, [], True)


@pytest.mark.parametrize(
    "rows",
    [
        [row("a", first_signal=None)],
        [row("a", caught=False)],
        [row("a", seconds=-1.0)],
        [row("a", seconds=float("inf"))],
        [row("a"), row("a")],
    ],
    ids=["caught by nothing", "seen but missed", "before its start", "forever", "twice"],
)
def test_what_no_row_may_say_is_refused_whole(engine, rows):
    with pytest.raises(sa.exc.IntegrityError):
        store_trials(engine, [MISSED, *rows], REVISION, utc_now())
    assert detections(engine) == []


def test_a_run_without_rows_is_none(engine):
    with pytest.raises(InputError, match="at least one row"):
        store_trials(engine, [], REVISION, utc_now())


def test_the_command_stores_and_lists(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli_faults, "detection_rows", lambda *arguments: [CAUGHT, MISSED])
    db = str(tmp_path / "new.db")
    assert cli.invoke(["faults", "--db", db, "--json"]) == 1
    captured = capsys.readouterr()
    assert [r["fault"] for r in json.loads(captured.out)] == ["a", "b"]
    assert "stored as detection run" in captured.err
    assert cli.invoke(["faults", "--stored", "--db", db, "--json"]) == 0
    (kept,) = json.loads(capsys.readouterr().out)
    assert kept["detection"] in captured.err
    assert (kept["planted"], kept["caught"], kept["missed"]) == (2, 1, ["b"])
    assert cli.invoke(["faults", "--stored", "--db", db]) == 0
    assert "1 of 2" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--stored"], ["--db", "nowhere/results.db"]])
def test_a_database_that_is_not_there_is_refused_before_anything_is_planted(monkeypatch, tmp_path, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli_faults, "detection_rows", lambda *arguments: pytest.fail("planted"))
    assert cli.invoke(["faults", *arguments]) == 4
    assert capsys.readouterr().err.startswith("error: db: got ")
