"""The tables of the gate: policies, decisions with their evidence, and what history is held against.

All of it is only ever appended. A decision keeps its inputs whole, so that it can be made again bit for
bit; an override is a decision of its own that supersedes another, with a name and a reason; of several
pins of one baseline the newest counts.
"""

import datetime
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from db.base import Base, finite, one_of

GATE_VERDICTS = ("PASS", "FAIL", "INCONCLUSIVE")
EVIDENCE_VERDICTS = (*GATE_VERDICTS, "QUIET")


class GatePolicy(Base):
    """A policy, keyed by the hash of its content."""

    __tablename__ = "gate_policy"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    document: Mapped[dict[str, Any]]


class GateDecision(Base):
    """What the gate said of a run. `document` is the whole decision, `inputs` what it was computed from, packed."""

    __tablename__ = "gate_decision"
    __table_args__ = (
        UniqueConstraint("supersedes"),
        one_of("verdict", GATE_VERDICTS, "verdict"),
        CheckConstraint("exit_code BETWEEN 0 AND 4", name="exit_code"),
        CheckConstraint("(verdict = 'PASS') = (exit_code = 0)", name="pass_is_zero"),
        CheckConstraint(
            "(supersedes IS NULL) = (override_by IS NULL) AND (supersedes IS NULL) = (override_reason IS NULL)",
            name="override",
        ),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("run.id"), index=True)
    policy_id: Mapped[str] = mapped_column(ForeignKey("gate_policy.id"))
    verdict: Mapped[str]
    exit_code: Mapped[int]
    reason: Mapped[str]
    inputs_sha: Mapped[str]
    inputs: Mapped[bytes]
    engine_sha: Mapped[str]
    document: Mapped[dict[str, Any]]
    created_at: Mapped[datetime.datetime]
    supersedes: Mapped[str | None] = mapped_column(ForeignKey("gate_decision.id"))
    override_by: Mapped[str | None]
    override_reason: Mapped[str | None]


class GateEvidence(Base):
    """What one endpoint said of one arm of one cell; a replicate arm's rows are the gate's own A/A control."""

    __tablename__ = "gate_evidence"
    __table_args__ = (
        one_of("verdict", EVIDENCE_VERDICTS, "verdict"),
        *(finite(column) for column in ("effect", "lo", "hi", "p_within", "p_beyond", "margin", "power")),
    )

    decision_id: Mapped[str] = mapped_column(ForeignKey("gate_decision.id"), primary_key=True)
    cell_id: Mapped[str] = mapped_column(ForeignKey("cell.id"), primary_key=True)
    arm_id: Mapped[str] = mapped_column(ForeignKey("arm.id"), primary_key=True)
    endpoint: Mapped[str] = mapped_column(primary_key=True)
    effect: Mapped[float | None]
    lo: Mapped[float | None]
    hi: Mapped[float | None]
    p_within: Mapped[float | None]
    p_beyond: Mapped[float | None]
    margin: Mapped[float | None]
    power: Mapped[float | None]
    n: Mapped[int]
    needed: Mapped[int | None]
    verdict: Mapped[str]
    reason: Mapped[str]


class NoiseModel(Base):
    """The noise of one metric in one family and environment as one decision's A/A rows showed it."""

    __tablename__ = "noise_model"
    __table_args__ = (UniqueConstraint("decision_id", "family", "comparable_hash", "metric"), finite("spread"))

    id: Mapped[str] = mapped_column(primary_key=True)
    decision_id: Mapped[str] = mapped_column(ForeignKey("gate_decision.id"))
    family: Mapped[str]
    comparable_hash: Mapped[str]
    metric: Mapped[str]
    spread: Mapped[float]
    n: Mapped[int]


class Baseline(Base):
    """A release that somebody pinned: the mean log ratio that later nights of a cell are held against."""

    __tablename__ = "baseline"
    __table_args__ = (UniqueConstraint("cell_id", "arm_id", "metric", "comparable_hash", "pinned_at"), finite("value"))

    id: Mapped[str] = mapped_column(primary_key=True)
    cell_id: Mapped[str] = mapped_column(ForeignKey("cell.id"))
    arm_id: Mapped[str] = mapped_column(ForeignKey("arm.id"))
    metric: Mapped[str] = mapped_column(ForeignKey("metric.name"))
    comparable_hash: Mapped[str]
    run_id: Mapped[str] = mapped_column(ForeignKey("run.id"))
    value: Mapped[float]
    pinned_at: Mapped[datetime.datetime]
    approver: Mapped[str]
    reason: Mapped[str]


class ChangePoint(Base):
    """A step in a cell's nightly log ratios, as one decision found it; `run_id` is the first night after it."""

    __tablename__ = "change_point"
    __table_args__ = (
        UniqueConstraint("decision_id", "cell_id", "arm_id", "metric", "run_id"),
        Index(None, "cell_id", "metric"),
        finite("p"),
        finite("rise"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    decision_id: Mapped[str] = mapped_column(ForeignKey("gate_decision.id"))
    cell_id: Mapped[str] = mapped_column(ForeignKey("cell.id"))
    arm_id: Mapped[str] = mapped_column(ForeignKey("arm.id"))
    metric: Mapped[str]
    run_id: Mapped[str] = mapped_column(ForeignKey("run.id"))
    p: Mapped[float]
    rise: Mapped[float]
