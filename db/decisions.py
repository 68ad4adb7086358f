"""Storing what the gate said, finding it again, and pinning releases. Only ever appended: an override supersedes."""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from db.decision_models import Baseline, ChangePoint, GateDecision, GateEvidence, GatePolicy, NoiseModel
from db.keys import utc_now, uuid7
from db.models import Arm, Block, Run
from db.night_series import night_ratios
from db.session import writer
from db.store import insert, insert_new
from suite.errors import InputError
from suite.records import METRICS

EVIDENCE = ("effect", "lo", "hi", "p_within", "p_beyond", "margin", "power", "n", "needed", "verdict", "reason")
Facts = dict[str, Any]


def store_decision(engine: sa.Engine, decision: Facts, policy: Facts, inputs: bytes) -> str:
    """Keep a decision with its policy and its packed inputs; returns its id.

    `decision` has every field that its own hash covers: those of the gate's Decision, as plain values.
    """
    key = uuid7()
    same = ("verdict", "exit_code", "reason", "inputs_sha", "engine_sha")
    row = {
        "id": key,
        "run_id": decision["run"],
        "policy_id": decision["policy_sha"],
        "inputs": inputs,
        "document": decision,
        "created_at": utc_now(),
        **{name: decision[name] for name in same},
    }
    evidence = [
        {
            "decision_id": key,
            "cell_id": cell["cell_id"],
            "arm_id": cell["arm_id"],
            "endpoint": found["endpoint"],
            **{name: found[name] for name in EVIDENCE},
        }
        for cell in decision["cells"]
        for found in cell["evidence"]
    ]
    noise = [{"id": uuid7(), "decision_id": key, **found} for found in decision["noise"]]
    steps = [
        {"id": uuid7(), "decision_id": key, "run_id": step["run"], **{k: v for k, v in step.items() if k != "run"}}
        for step in decision["steps"]
    ]
    with writer(engine).begin() as connection:
        document = {"id": decision["policy_sha"], "name": decision["policy"], "document": policy}
        insert_new(connection, GatePolicy, [document])
        insert(connection, GateDecision, [row])
        insert(connection, GateEvidence, evidence)
        insert(connection, NoiseModel, noise)
        insert(connection, ChangePoint, steps)
    return key


def find_decision(engine: sa.Engine, decision: str) -> Any:
    """The stored decision of that id or unique beginning, with its policy's document; InputError when there is none."""
    d = GateDecision
    query = sa.select(*d.__table__.columns, GatePolicy.document.label("policy")).join(
        GatePolicy, d.policy_id == GatePolicy.id
    )
    with engine.connect() as connection:
        found = connection.execute(query.where(d.id.startswith(decision, autoescape=True)).limit(2)).all()
    if len(found) != 1 or not decision:
        many = "; more than one begins so" if found else ""
        raise InputError("decision", decision, f"the id of a decision of this database or its unique beginning{many}")
    return found[0]


def store_override(engine: sa.Engine, decision: str, by: str, reason: str) -> str:
    """Let a person say PASS to a decision that did not; returns the id of the superseding decision.

    InputError without a name or a reason, for a decision that passed, is superseded, or is an override itself.
    """
    for field, value in (("by", by), ("reason", reason)):
        if not value.strip():
            raise InputError(field, value, "a text: an override needs both a name and a reason")
    found = find_decision(engine, decision)
    if found.verdict == "PASS":
        raise InputError("override", found.id, "a decision that is not PASS already")
    key = uuid7()
    same = ("run_id", "policy_id", "inputs_sha", "inputs", "engine_sha", "document")
    row = {
        "id": key,
        "verdict": "PASS",
        "exit_code": 0,
        "reason": f"{by} overrode {found.verdict}: {reason}",
        "created_at": utc_now(),
        "supersedes": found.id,
        "override_by": by,
        "override_reason": reason,
        **{name: getattr(found, name) for name in same},
    }
    with writer(engine).begin() as connection:
        taken = connection.scalar(sa.select(GateDecision.id).where(GateDecision.supersedes == found.id))
        if taken is not None:
            raise InputError("override", found.id, f"a decision that none supersedes, {taken} does")
        insert(connection, GateDecision, [row])
    return key


def pin_release(engine: sa.Engine, run_id: str, by: str, reason: str) -> int:
    """Pin every mean log ratio of the run's timings as the release to hold later nights against; returns how many.

    InputError without a name or a reason, or where the run has nothing to pin.
    """
    for field, value in (("by", by), ("reason", reason)):
        if not value.strip():
            raise InputError(field, value, "a text: a pin needs both a name and a reason")
    timings = [name for name, kind in METRICS.items() if kind.timing and kind.better in ("lower", "higher")]
    now = utc_now()
    with writer(engine).begin() as connection:
        cells = cells_of(connection, run_id)
        planted = {key for key, plants in connection.execute(sa.select(Arm.id, Arm.plants)) if plants}
        ratios = night_ratios(connection, [run_id], cells, timings, planted)
        rows = [
            {
                "id": uuid7(),
                "cell_id": cell,
                "arm_id": arm,
                "metric": metric,
                "comparable_hash": home,
                "run_id": run_id,
                "value": sum(values) / len(values),
                "pinned_at": now,
                "approver": by,
                "reason": reason,
            }
            for (cell, arm, metric), nights in ratios.items()
            for (_, home), values in nights.items()
        ]
        if not rows:
            raise InputError("pin", run_id, "a run with blocks in which both arms passed and were timed")
        insert(connection, Baseline, rows)
    return len(rows)


def cells_of(connection: sa.Connection, run_id: str) -> Sequence[str]:
    if connection.scalar(sa.select(Run.id).where(Run.id == run_id)) is None:
        raise InputError("pin", run_id, "a run of this database")
    return connection.scalars(sa.select(Block.cell_id).where(Block.run_id == run_id).distinct()).all()


def control_alarms(engine: sa.Engine) -> tuple[int, int]:
    """How many tests of replicate arms were stored, and how many of them failed: the gate's real false-alarm rate."""
    e = GateEvidence
    query = sa.select(e.verdict, sa.func.count().label("n")).join(Arm, e.arm_id == Arm.id)
    query = query.where(Arm.label == "replicate")
    with engine.connect() as connection:
        counts = {row.verdict: row.n for row in connection.execute(query.group_by(e.verdict))}
    return sum(counts.values()), counts.get("FAIL", 0)
