"""Storing detection runs, and what the stored ones came to. Only ever appended."""

import datetime
from collections.abc import Sequence
from typing import Any, TypedDict

import sqlalchemy as sa

from db.fault_models import FaultTrial
from db.keys import uuid7
from db.models import CodeRev
from db.rows import code_rev_row
from db.session import writer
from db.store import insert, insert_new
from suite.errors import InputError
from suite.provenance import CodeRevision

SAME = ("fault", "kind", "seam", "first_signal", "caught", "clean_twin_passed", "seconds", "gpu_seconds")


class Detection(TypedDict):
    """One stored detection run in short: its revision, where it ran, and what was missed."""

    detection: str
    started_at: str
    sha: str
    dirty: bool
    device: str
    seed: int
    fresh: bool
    planted: int
    caught: int
    clean_twins_failed: int
    missed: list[str]


def store_trials(
    engine: sa.Engine,
    rows: Sequence[dict[str, Any]],
    revision: CodeRevision,
    started_at: datetime.datetime,
    *,
    device: str = "cpu",
    seed: int = 0,
    fresh: bool = False,
) -> str:
    """Keep the rows of a detection run, as `kvproof faults --json` prints them; returns its id. InputError for none."""
    if not rows:
        raise InputError("faults", [], "at least one row of a detection run")
    key, code_rev = uuid7(), code_rev_row(revision)
    run = {"detection_id": key, "code_rev_id": code_rev["id"], "started_at": started_at}
    setting = {"device": device, "seed": seed, "fresh": fresh}
    trials = [
        {
            "id": uuid7(),
            **run,
            **setting,
            **{name: row[name] for name in SAME},
            "size": row["severity"],
            "expected": row["expected"],
            "signals": row["by"],
        }
        for row in rows
    ]
    with writer(engine).begin() as connection:
        insert_new(connection, CodeRev, [code_rev])
        insert(connection, FaultTrial, trials)
    return key


def detections(engine: sa.Engine) -> list[Detection]:
    """Every stored detection run, oldest first."""
    trial, rev = FaultTrial, CodeRev
    same = (trial.detection_id, trial.device, trial.seed, trial.fresh, trial.started_at, rev.sha, rev.dirty)
    each = (trial.fault, trial.caught, trial.clean_twin_passed)
    query = sa.select(*same, *each).join(rev, trial.code_rev_id == rev.id).order_by(trial.detection_id, trial.id)
    found: dict[str, Detection] = {}
    with engine.connect() as connection:
        for row in connection.execute(query):
            known = found.setdefault(row.detection_id, new_detection(row))
            known["planted"] += 1
            known["caught"] += row.caught
            known["clean_twins_failed"] += not row.clean_twin_passed
            if not row.caught:
                known["missed"].append(row.fault)
    return list(found.values())


def new_detection(row: Any) -> Detection:
    return Detection(
        detection=row.detection_id,
        started_at=row.started_at.isoformat(),
        sha=row.sha,
        dirty=row.dirty,
        device=row.device,
        seed=row.seed,
        fresh=row.fresh,
        planted=0,
        caught=0,
        clean_twins_failed=0,
        missed=[],
    )
