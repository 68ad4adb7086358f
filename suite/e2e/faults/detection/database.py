"""Database faults: rows lost, doubled, half written, or holding what no row may; clocks; schemas that drift.

The scenario writes a small run through the real store into a new SQLite file, reads it back, and asks the
database's own checks what they find.
"""

import datetime
import itertools
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from db import session
from db.invariants import broken_rows
from db.queries import ended_rows
from db.runs import run_counts
from db.store import Entry, Store
from suite.e2e.faults.detection.signals import cell_of, passed
from suite.e2e.faults.fault import Setting, Signal, plants
from suite.errors import KvproofError
from suite.provenance import CodeRevision
from suite.records import Arm, Cell, CellJob, ItemOutcome, Metric, Outcome, Samples

REVISION = CodeRevision(repo="kvproof", sha="0" * 40, patch_sha="", branch=None, dirty=False)
START = datetime.datetime(2026, 12, 1, tzinfo=datetime.UTC)
LOST, CHECK, VALUES = "db.rows_differ", "db.invariant_broken", "db.values_differ"
CONSTRAINT, BOOKS = "db.constraint", "db.invariant"
CHECKS, STORE = "db.checks", "db.store:Store"
BLOCKS = 3


def job(arm: str, block: int, cell: Cell) -> CellJob:
    return CellJob(cell=cell, arm=Arm(pool=arm), block=block, timeout_s=60.0)  # type: ignore[arg-type]


def outcome(block: int, arm: str) -> Outcome:
    number = 3.0 + block + (arm == "unified") / 4
    return passed(
        metrics={"itl_ms": Metric.of("itl_ms", number, 8), "accuracy": Metric.of("accuracy", 0.75, 4)},
        samples=(Samples.pack("itl_ms", np.full(8, number)),),
        items=tuple(
            ItemOutcome(task="t", doc_hash=f"d{i}", prompt_hash=f"p{i}", target_hash="t", correct=i > 0, answer=str(i))
            for i in range(4)
        ),
    )


def written(setting: Setting) -> Iterator[Signal]:
    """Six rows of three blocks, one payload twice, one bad batch, and a process that dies before it ends the run."""
    with tempfile.TemporaryDirectory(prefix="kvproof-faults-") as folder:
        engine = session.open_db(Path(folder) / "faults.db")
        try:
            yield from write_and_read(engine)
        finally:
            engine.dispose()


def write_and_read(engine: Any) -> Iterator[Signal]:
    cell, arms = cell_of("engine"), ("static", "unified")
    jobs = [job(arm, block, cell) for block in range(BLOCKS + 1) for arm in arms]
    run = Store(engine).begin_run("faults", {"name": "faults"}, jobs, REVISION)
    for block in range(BLOCKS):
        entries = [Entry(job=job(a, block, cell), outcome=outcome(block, a), started_at=START) for a in arms]
        Store(engine).ingest_all(run, entries)
        Store(engine).ingest_all(run, entries[:1])  # the same payload twice is one row
    yield from bad_batches(engine, run, cell)
    yield from read_back(engine, run, arms)


def bad_batches(engine: Any, run: str, cell: Cell) -> Iterator[Signal]:
    """Batches with one row that may not be: all of it must be refused."""
    good = Entry(job=job("static", BLOCKS, cell), outcome=outcome(9, "static"), started_at=START)
    nan = replace(outcome(9, "unified"), metrics={"itl_ms": Metric(value=float("nan"), unit="ms", n=1)})
    slow = replace(outcome(9, "unified"), status="wrong", reason="logits differ")
    naive = Entry(
        job=job("unified", BLOCKS, cell), outcome=outcome(9, "unified"), started_at=START.replace(tzinfo=None)
    )
    other = Entry(job=job("unified", BLOCKS, cell), outcome=slow, started_at=START)
    again = Entry(job=job("unified", 0, cell), outcome=outcome(5, "unified"), started_at=START)
    for name, bad in (
        ("nan", replace(other, outcome=nan)),
        ("wrong_with_latency", other),
        ("naive_time", naive),
        ("second_result", again),
    ):
        try:
            Store(engine).ingest_all(run, [good, bad])
        except (KvproofError, ValueError):
            continue  # refused, as it must be
        except Exception as error:
            if type(error).__name__ not in ("StatementError", "IntegrityError"):
                raise
            if name != "naive_time":
                yield Signal(name=CONSTRAINT, text=f"{name}: stopped by the database alone: {error.__class__.__name__}")
            continue
        yield Signal(name=f"db.{name}_accepted", text=f"{name}: a batch with such a row was written")


def read_back(engine: Any, run: str, arms: tuple[str, ...]) -> Iterator[Signal]:
    want = 2 * BLOCKS
    if (found := sum(run_counts(engine, run).values())) != want:
        yield Signal(name=LOST, text=f"{found} rows after {want} outcomes")
    values = [row.show["metrics"].get("itl_ms", {}).get("value") for row in ended_rows(engine, run)]
    expected = [outcome(block, arm).metrics["itl_ms"].value for block in range(BLOCKS) for arm in arms]
    if values != expected:
        yield Signal(name=VALUES, text=f"itl_ms {values}, expected {expected}")
    for broken in itertools.islice(broken_rows(engine), 1):
        yield Signal(name=CHECK, text=f"{broken['invariant']}: {broken['row']}: {broken['found']}")


def locked(setting: Setting) -> Iterator[Signal]:
    """A row is written while another process holds the database for a moment."""
    with tempfile.TemporaryDirectory(prefix="kvproof-faults-") as folder:
        path = Path(folder) / "faults.db"
        engine = session.open_db(path)
        wait_ms = 0
        with engine.connect() as connection:
            wait_ms = int(connection.exec_driver_sql("PRAGMA busy_timeout").scalar())
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        other.close()  # a process that dies gives its lock back
        engine.dispose()
        if wait_ms < 1000:
            yield Signal(name="db.no_wait", text=f"a writer waits {wait_ms} ms for another one, expected 1000 at least")


def reopened(setting: Setting) -> Iterator[Signal]:
    """A database is opened twice; its tables are those that the code expects."""
    with tempfile.TemporaryDirectory(prefix="kvproof-faults-") as folder:
        for _ in range(2):
            engine = session.open_db(Path(folder) / "faults.db")
            try:
                yield from write_and_read(engine)
            finally:
                engine.dispose()


@plants("database", f"{STORE}.ingest_all", written, LOST, source="B47", smoke=True)
def rows_written_at_the_end(own: Any) -> Any:
    """rows are kept in memory until the run ends; a process that dies before loses them"""
    return lambda self, run, entries: [entry.id for entry in entries]


@plants("database", f"{STORE}.ingest_all", written, LOST, VALUES, CHECK, source="B47", severity=1)
def a_batch_is_not_one_transaction(own: Any) -> Any:
    """the rows of a batch are written one by one: what comes before a bad one stays"""
    return lambda self, run, entries: [row for entry in entries for row in own(self, run, [entry])]


@plants("database", f"{STORE}.ingest_all", written, LOST, VALUES, CHECK, severity=1)
def last_row_of_a_batch_dropped(own: Any) -> Any:
    """of every batch of outcomes the last one is not written"""
    return lambda self, run, entries: own(self, run, entries[:-1] or entries)


@plants("database", "db.store:check_outcome", written, CONSTRAINT, "db.wrong_with_latency_accepted")
def outcomes_stored_unchecked(own: Any) -> Any:
    """what a child says is written as it is: NaN, and times of wrong rows"""
    return lambda outcome: None


@plants("database", f"{CHECKS}:check_metric", written, CONSTRAINT, "db.wrong_with_latency_accepted")
def numbers_stored_unchecked(own: Any) -> Any:
    """a NaN passes for a measurement, a wrong row for one with a latency"""
    return lambda name, metric, passed: None


@plants("database", "db.base:UtcTime.process_bind_param", written, "db.naive_time_accepted", LOST, source="B50")
def naive_times_taken_for_utc(own: Any) -> Any:
    """a time without a zone is stored as if it were UTC"""

    def naive(self: Any, value: Any, dialect: Any) -> Any:
        return own(self, None if value is None else value.replace(tzinfo=datetime.UTC), dialect)

    return naive


@plants("database", "db.store:known_payloads", written, BOOKS, CONSTRAINT, source="B46", smoke=True)
def payloads_ingested_twice(own: Any) -> Any:
    """nobody looks whether a payload is in already: a retried write is a second row"""
    return lambda connection, shas: {}


@plants("database", "db.store:refuse_second", written, CONSTRAINT, "db.second_result_accepted")
def second_result_of_an_attempt(own: Any) -> Any:
    """an attempt that has ended may end again, otherwise"""
    return lambda connection, run, rows: None


@plants("database", "db.store:payload_sha", written, CONSTRAINT, BOOKS, LOST, "db.second_result_accepted")
def payload_hash_leaves_the_outcome_out(own: Any) -> Any:
    """a payload is known by its cell, arm and block alone"""
    return lambda run, job, attempt, outcome: own(run, job, attempt, None)


@plants("database", "db.store:sample_rows", written, CHECK)
def samples_stored_with_a_bit_off(own: Any) -> Any:
    """stored samples are not the bytes that were packed"""

    def flipped(row_id: str, outcome: Outcome) -> Any:
        return [{**row, "data": row["data"][:-1] + bytes([row["data"][-1] ^ 1])} for row in own(row_id, outcome)]

    return flipped


@plants("database", "db.store:measurement_rows", written, VALUES, severity=1e-3)
def numbers_rounded_when_stored(own: Any) -> Any:
    """measurements are stored with one digit behind the point"""
    return lambda row_id, outcome: [{**row, "value": round(row["value"], 1)} for row in own(row_id, outcome)]


@plants("database", "db.store:arm_row", written, CHECK, BOOKS, CONSTRAINT)
def arms_keyed_by_name(own: Any) -> Any:
    """an arm's key is its pool's name: planted and honest arms share it"""
    return lambda job: {**own(job), "id": job.arm.pool}


@plants("database", "db.session:set_up_sqlite", locked, "db.no_wait", source="B46")
def writers_do_not_wait(own: Any) -> Any:
    """a second writer fails at once: the database is locked"""

    def impatient(connection: Any, record: Any) -> None:
        own(connection, record)
        connection.execute("PRAGMA busy_timeout = 0")

    return impatient


@plants("database", "db.session:upgrade", reopened, "db.unusable", "db.crash", source="B48")
def schema_marked_as_upgraded(own: Any) -> Any:
    """a database is said to be of the newest schema, and no migration has run"""

    def stamped(engine: Any, create: bool) -> None:
        with session.writer(engine).begin() as connection:
            session.command.stamp(session.alembic_config(connection), "head")

    return stamped
