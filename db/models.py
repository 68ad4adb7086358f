"""The tables. Alembic's migrations are the only authority that creates them.

A *run* executes one plan. Its *cells* are points of the matrix, its *arms* the pool modes compared
inside a cell, its *blocks* fresh paired runs of the arms; each (run, cell, arm, block, attempt) is
exactly one *cell_run*, whose status decides what may hang on it. Facts are only ever appended.
Only types that every database has: text, integers, doubles, bytes, JSON.
"""

import datetime
from typing import Any

from sqlalchemy import JSON, CheckConstraint, Double, ForeignKey, Index, LargeBinary, MetaData, String, UniqueConstraint
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from suite.records import LAUNCHERS, POOL_MODES, STATUSES

RUN_STATES = ("running", "finished", "interrupted", "failed")
VERDICTS = ("equal", "differs", "not_comparable")
DIRECTIONS = ("higher", "lower", "zero", "neither")
LARGEST_DOUBLE = "1.7976931348623157e308"


class UtcTime(TypeDecorator[datetime.datetime]):
    """An aware time, kept as fixed-width ISO text in UTC, so that text order is time order. Refuses naive times."""

    impl = String(32)
    cache_ok = True

    def process_bind_param(self, value: datetime.datetime | None, dialect: Dialect) -> str | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"time: got the naive {value.isoformat()}, expected one with its offset from UTC")
        return value.astimezone(datetime.UTC).isoformat(timespec="microseconds")

    def process_result_value(self, value: str | None, dialect: Dialect) -> datetime.datetime | None:
        return None if value is None else datetime.datetime.fromisoformat(value)


class Base(DeclarativeBase):
    """Constraints are named by rule, so that migrations can drop them by name on every database."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it as a plain class attribute
        str: String(),
        bytes: LargeBinary(),
        float: Double(),
        datetime.datetime: UtcTime(),
        dict[str, Any]: JSON(),
        list[str]: JSON(),
        list[int]: JSON(),
    }


def one_of(column: str, names: tuple[str, ...], name: str) -> CheckConstraint:
    return CheckConstraint(f"{column} IN ({', '.join(repr(n) for n in names)})", name=name)


def finite(column: str) -> CheckConstraint:
    """Refuses infinities and, where the database can hold one, NaN."""
    return CheckConstraint(f"{column} BETWEEN -{LARGEST_DOUBLE} AND {LARGEST_DOUBLE}", name=f"{column}_finite")


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
    """One execution of one plan."""

    __tablename__ = "run"
    __table_args__ = (one_of("state", RUN_STATES, "state"), Index(None, "started_at"))

    id: Mapped[str] = mapped_column(primary_key=True)
    suite: Mapped[str]
    code_rev_id: Mapped[str] = mapped_column(ForeignKey("code_rev.id"))
    plan_sha: Mapped[str]
    plan: Mapped[dict[str, Any]]
    planned: Mapped[int]
    state: Mapped[str]
    started_at: Mapped[datetime.datetime]
    finished_at: Mapped[datetime.datetime | None]


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
    """A pool mode with the faults planted into it, keyed by the hash of both."""

    __tablename__ = "arm"
    __table_args__ = (one_of("pool", POOL_MODES, "pool"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    pool: Mapped[str]
    plants: Mapped[list[str]]


class Block(Base):
    """One fresh paired run of a cell's arms; `arm_order` is the order in which they ran."""

    __tablename__ = "block"
    __table_args__ = (UniqueConstraint("run_id", "cell_id", "number"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("run.id"))
    cell_id: Mapped[str] = mapped_column(ForeignKey("cell.id"))
    number: Mapped[int]
    arm_order: Mapped[list[str]]
    seed: Mapped[int]


class CellRun(Base):
    """How one arm of one cell ended in one block, at which commit. Only a passed row has timings."""

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
    __table_args__ = (finite("value"), finite("lo"), finite("hi"), CheckConstraint("n >= 0", name="n"))

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
