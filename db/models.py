"""The tables. Alembic's migrations are the only authority that creates them.

A *run* executes one plan. Its *cells* are points of the matrix, its *arms* the pool modes compared
inside a cell, its *blocks* fresh paired runs of the arms; each (run, cell, arm, block, attempt) is
exactly one *cell_run*, whose status decides what may hang on it. Facts are only ever appended.
Only types that every database has: text, integers, doubles, bytes, JSON.
"""

import datetime
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from db.base import Base as Base
from db.base import finite, one_of
from suite.records import LAUNCHERS, POOL_MODES, STATUSES

RUN_STATES = ("running", "finished", "interrupted", "failed")
VERDICTS = ("equal", "differs", "not_comparable")
DIRECTIONS = ("higher", "lower", "zero", "neither")
CLUSTERED = {"sqlite_with_rowid": False}  # small rows of long keys, which are then stored once


class Environment(Base):
    """What ran, revision apart. `comparable_hash` covers what two rows must share to be compared."""

    __tablename__ = "environment"

    id: Mapped[str] = mapped_column(primary_key=True)
    comparable_hash: Mapped[str] = mapped_column(index=True)
    device_name: Mapped[str]
    driver: Mapped[str | None]
    cuda: Mapped[str | None]
    torch: Mapped[str]
    triton: Mapped[str]
    kernel_library: Mapped[str | None]
    kernel_version: Mapped[str | None]
    document: Mapped[dict[str, Any]]


class CodeRev(Base):
    """A revision of the code. `patch_sha` is the hash of what was not committed, empty when nothing was."""

    __tablename__ = "code_rev"
    __table_args__ = (UniqueConstraint("repo", "sha", "patch_sha"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    repo: Mapped[str]
    sha: Mapped[str]
    patch_sha: Mapped[str]
    branch: Mapped[str | None]
    dirty: Mapped[bool]


class Run(Base):
    """One execution of one plan. `seed` orders the arms and places the buffers of every block.

    While it runs, `lease_owner` names the process that executes it and `heartbeat_at` when that was last seen
    alive; `spool` is where its children's files lie. A later process may take over a lease whose owner is gone.
    """

    __tablename__ = "run"
    __table_args__ = (
        one_of("state", RUN_STATES, "state"),
        Index(None, "started_at"),
        {"info": {"mutable": ("state", "finished_at", "lease_owner", "heartbeat_at", "spool")}},
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    suite: Mapped[str]
    code_rev_id: Mapped[str] = mapped_column(ForeignKey("code_rev.id"))
    plan_sha: Mapped[str]
    plan: Mapped[dict[str, Any]]
    planned: Mapped[int]
    state: Mapped[str]
    started_at: Mapped[datetime.datetime]
    finished_at: Mapped[datetime.datetime | None]
    seed: Mapped[int | None]
    shard: Mapped[str | None]
    environment: Mapped[dict[str, Any] | None]
    environment_hash: Mapped[str | None]
    lease_owner: Mapped[str | None]
    heartbeat_at: Mapped[datetime.datetime | None]
    spool: Mapped[str | None]


class Cell(Base):
    """One point of the matrix, keyed by the hash of `params`, the whole of it."""

    __tablename__ = "cell"
    __table_args__ = (one_of("launcher", LAUNCHERS, "launcher"), CheckConstraint("page_size > 0", name="page_size"))

    id: Mapped[str] = mapped_column(primary_key=True)
    family: Mapped[str]
    model: Mapped[str]
    backend: Mapped[str]
    launcher: Mapped[str]
    device: Mapped[str]
    dtype: Mapped[str]
    page_size: Mapped[int]
    graph: Mapped[bool]
    workload: Mapped[str]
    params: Mapped[dict[str, Any]]


class Arm(Base):
    """A pool mode with the faults planted into it, keyed by the hash of both and of its label.

    The label tells apart arms that are the same on purpose: `replicate` is the static arm's second run (A/A').
    """

    __tablename__ = "arm"
    __table_args__ = (one_of("pool", POOL_MODES, "pool"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    pool: Mapped[str]
    plants: Mapped[list[str]]
    label: Mapped[str | None]


class Block(Base):
    """One fresh paired run of a cell's arms; `arm_order` is the order in which they run, `seed` places buffers."""

    __tablename__ = "block"
    __table_args__ = (UniqueConstraint("run_id", "cell_id", "number"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("run.id"))
    cell_id: Mapped[str] = mapped_column(ForeignKey("cell.id"))
    number: Mapped[int]
    arm_order: Mapped[list[str]]
    seed: Mapped[int]


class CellRun(Base):
    """How one arm of one cell ended in one attempt at one block, at which commit. Only a passed row has timings.

    All arms of a block enter with the same attempt, together: the latest attempt is the block's result. Where a guard
    found that the arms did not run alike, `void_reason` says why: such rows enter no mean, whatever their status.
    """

    __tablename__ = "cell_run"
    __table_args__ = (
        UniqueConstraint("run_id", "cell_id", "arm_id", "block_id", "attempt"),
        one_of("status", STATUSES, "status"),
        CheckConstraint("attempt > 0", name="attempt"),
        CheckConstraint("duration_s >= 0", name="duration_s"),
        CheckConstraint("status = 'passed' OR reason IS NOT NULL", name="reason"),
        CheckConstraint("status <> 'passed' OR launcher IS NOT NULL", name="passed_launcher"),
        CheckConstraint("status <> 'passed' OR environment_id IS NOT NULL", name="passed_environment"),
        Index(None, "cell_id", "arm_id", "started_at"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("run.id"))
    cell_id: Mapped[str] = mapped_column(ForeignKey("cell.id"))
    arm_id: Mapped[str] = mapped_column(ForeignKey("arm.id"))
    block_id: Mapped[str] = mapped_column(ForeignKey("block.id"))
    attempt: Mapped[int]
    status: Mapped[str]
    reason_code: Mapped[str | None]
    reason: Mapped[str | None]
    launcher: Mapped[str | None]
    environment_id: Mapped[str | None] = mapped_column(ForeignKey("environment.id"))
    revision: Mapped[str | None]
    dirty: Mapped[bool | None]
    effective: Mapped[dict[str, Any]]
    prompt_hash: Mapped[str | None]
    started_at: Mapped[datetime.datetime]
    duration_s: Mapped[float]
    exit_code: Mapped[int | None]
    signal: Mapped[int | None]
    stderr_tail: Mapped[str | None]
    gpu_uuid: Mapped[str | None]
    guards: Mapped[dict[str, Any] | None]
    void_reason: Mapped[str | None]


class Metric(Base):
    """What a metric is: unit, which direction is better, and whether it is a time."""

    __tablename__ = "metric"
    __table_args__ = (one_of("better", DIRECTIONS, "better"),)

    name: Mapped[str] = mapped_column(primary_key=True)
    unit: Mapped[str]
    better: Mapped[str]
    timing: Mapped[bool]


class Measurement(Base):
    """One number of one row: `stat` of `metric` over `n` observations, with its interval where one is known."""

    __tablename__ = "measurement"
    __table_args__ = (finite("value"), finite("lo"), finite("hi"), CheckConstraint("n >= 0", name="n"), CLUSTERED)

    cell_run_id: Mapped[str] = mapped_column(ForeignKey("cell_run.id"), primary_key=True)
    metric: Mapped[str] = mapped_column(ForeignKey("metric.name"), primary_key=True)
    stat: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[float]
    lo: Mapped[float | None]
    hi: Mapped[float | None]
    n: Mapped[int]


class SampleBlock(Base):
    """Raw observations of one row, packed."""

    __tablename__ = "sample_block"

    cell_run_id: Mapped[str] = mapped_column(ForeignKey("cell_run.id"), primary_key=True)
    metric: Mapped[str] = mapped_column(primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True)
    n: Mapped[int]
    shape: Mapped[list[int]]
    codec: Mapped[str]
    data: Mapped[bytes]
    sha256: Mapped[str]


class Item(Base):
    """One question of one accuracy task, keyed by the hash of its texts' hashes."""

    __tablename__ = "item"

    id: Mapped[str] = mapped_column(primary_key=True)
    task: Mapped[str] = mapped_column(index=True)
    doc_hash: Mapped[str]
    prompt_hash: Mapped[str]
    target_hash: Mapped[str]


class ItemResult(Base):
    """How one row answered one question."""

    __tablename__ = "item_result"
    __table_args__ = CLUSTERED

    cell_run_id: Mapped[str] = mapped_column(ForeignKey("cell_run.id"), primary_key=True)
    item_id: Mapped[str] = mapped_column(ForeignKey("item.id"), primary_key=True)
    repeat: Mapped[int] = mapped_column(primary_key=True)
    correct: Mapped[bool]
    answer: Mapped[str]


class Comparison(Base):
    """A verdict over two rows of one cell, with what it was computed from."""

    __tablename__ = "comparison"
    __table_args__ = (
        UniqueConstraint("static_id", "candidate_id", "metric", "method"),
        one_of("verdict", VERDICTS, "verdict"),
        finite("effect"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("run.id"), index=True)
    kind: Mapped[str]
    static_id: Mapped[str] = mapped_column(ForeignKey("cell_run.id"))
    candidate_id: Mapped[str] = mapped_column(ForeignKey("cell_run.id"))
    metric: Mapped[str] = mapped_column(ForeignKey("metric.name"))
    method: Mapped[str]
    version: Mapped[int]
    effect: Mapped[float | None]
    verdict: Mapped[str]
    inputs_sha: Mapped[str]
    created_at: Mapped[datetime.datetime]


class IngestLog(Base):
    """The payloads that are in: the same one twice is one row."""

    __tablename__ = "ingest_log"

    source_sha: Mapped[str] = mapped_column(primary_key=True)
    cell_run_id: Mapped[str] = mapped_column(ForeignKey("cell_run.id"), unique=True)
    ingested_at: Mapped[datetime.datetime]
