"""The one writer of results.

A run is announced whole, with its plan; then outcomes are ingested in batches (a block's arms together),
each batch in one transaction: the rows, their measurements, samples, items and comparisons, and a note
that each payload is in. The same payload twice is one row; a different one for the same attempt is refused.
"""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from db import models
from db.base import Base
from db.checks import check_outcome
from db.keys import utc_now, uuid7
from db.rows import (
    Rows,
    arm_row,
    block_rows,
    cell_row,
    code_rev_row,
    environment_row,
    item_rows,
    measurement_rows,
    metric_row,
    outcome_columns,
    payload_sha,
    sample_rows,
)
from db.session import writer
from suite.errors import InvariantError, KvproofError
from suite.provenance import CodeRevision
from suite.records import CellJob, Outcome, Record, content_hash

IN_ONE_QUERY = 500  # values of an IN; SQLite takes more, a plan need not


class Comparison(Record, frozen=True):
    """A verdict over the static row `static_id` and the row it is ingested with."""

    static_id: str
    metric: str
    method: str
    version: int
    effect: float | None
    verdict: str


class Entry(Record, frozen=True):
    """One outcome to become a row. `id` is the row's, so that another entry of the batch can refer to it."""

    job: CellJob
    outcome: Outcome
    started_at: datetime.datetime
    id: str = msgspec.field(default_factory=uuid7)
    attempt: int = 1
    void_reason: str | None = None
    comparisons: tuple[Comparison, ...] = ()


class LeaseLostError(KvproofError):
    """Another process has taken the run over: this one may write no more of it."""


class Store:
    """Writes runs and rows into one database, as `owner` where runs are leased."""

    def __init__(self, engine: sa.Engine, owner: str | None = None) -> None:
        self.engine, self.owner = writer(engine), owner

    def begin_run(
        self,
        suite: str,
        plan: dict[str, Any],
        jobs: Sequence[CellJob],
        revision: CodeRevision,
        *,
        run_id: str | None = None,
        seed: int | None = None,
        block_seeds: Mapping[tuple[str, int], int] | None = None,
        shard: str | None = None,
        environment: dict[str, Any] | None = None,
        spool: str | None = None,
    ) -> str:
        """Announce a run of `jobs`, in the order in which they run; returns its id. Seeds are by cell key and block."""
        code_rev, now = code_rev_row(revision), utc_now()
        run = {
            "id": run_id or uuid7(),
            "suite": suite,
            "code_rev_id": code_rev["id"],
            "plan_sha": content_hash(plan),
            "plan": plan,
            "planned": len(jobs),
            "state": "running",
            "started_at": now,
            "seed": seed,
            "shard": shard,
            "environment": environment,
            "environment_hash": content_hash(environment) if environment else None,
            "lease_owner": self.owner,
            "heartbeat_at": now if self.owner else None,
            "spool": spool,
        }
        with self.engine.begin() as connection:
            insert_new(connection, models.CodeRev, [code_rev])
            insert_new(connection, models.Cell, [cell_row(job) for job in jobs])
            insert_new(connection, models.Arm, [arm_row(job) for job in jobs])
            insert(connection, models.Run, [run])
            insert(connection, models.Block, block_rows(run["id"], jobs, block_seeds or {}))
        return str(run["id"])

    def ingest(
        self,
        run_id: str,
        job: CellJob,
        outcome: Outcome,
        *,
        started_at: datetime.datetime,
        attempt: int = 1,
        comparisons: Sequence[Comparison] = (),
        void_reason: str | None = None,
    ) -> str:
        """Make `outcome` the row of `job`; see `ingest_all`. Returns the row's id."""
        entry = Entry(
            job=job,
            outcome=outcome,
            started_at=started_at,
            attempt=attempt,
            comparisons=tuple(comparisons),
            void_reason=void_reason,
        )
        return self.ingest_all(run_id, [entry])[0]

    def ingest_all(self, run_id: str, entries: Sequence[Entry]) -> list[str]:
        """Make every entry a row, all of them or none; returns the rows' ids.

        Raises InputError for an outcome that no row may have (see `check_outcome`), InvariantError when
        an attempt already ended otherwise or was not planned.
        """
        shas = []
        for entry in entries:
            check_outcome(entry.outcome)
            shas.append(payload_sha(run_id, entry.job, entry.attempt, entry.outcome))
        with self.engine.begin() as connection:
            self.hold(connection, run_id)
            known = known_payloads(connection, shas)
            new = [(entry, sha) for entry, sha in zip(entries, shas, strict=True) if sha not in known]
            insert_entries(connection, run_id, new)
        return [known.get(sha, entry.id) for entry, sha in zip(entries, shas, strict=True)]

    def hold(self, connection: sa.Connection, run_id: str) -> None:
        """Say that the owner still executes the run; LeaseLostError when that is another by now."""
        if self.owner is None:
            return
        run = models.Run
        mine = sa.update(run).where(run.id == run_id, run.lease_owner == self.owner).values(heartbeat_at=utc_now())
        if connection.execute(mine).rowcount != 1:
            raise LeaseLostError(f"run {run_id}: another process has taken it over from {self.owner}")

    def heartbeat(self, run_id: str) -> None:
        with self.engine.begin() as connection:
            self.hold(connection, run_id)

    def take_over(self, run_id: str, before: str | None, spool: str) -> bool:
        """Lease the run, whose owner was `before`, to ours; False when somebody else was faster."""
        run = models.Run
        new = {"lease_owner": self.owner, "spool": spool, "heartbeat_at": utc_now()}
        new |= {"state": "running", "finished_at": None}
        with self.engine.begin() as connection:
            same = run.lease_owner.is_(None) if before is None else run.lease_owner == before
            return connection.execute(sa.update(run).where(run.id == run_id, same).values(**new)).rowcount == 1

    def end_run(self, run_id: str, state: str) -> None:
        """Close the run: "finished", "interrupted" or "failed"."""
        run = models.Run
        with self.engine.begin() as connection:
            end = {"state": state, "finished_at": utc_now(), "lease_owner": None}
            connection.execute(sa.update(run).where(run.id == run_id).values(**end))


def insert(connection: sa.Connection, model: type[Base], rows: Rows) -> None:
    if rows:
        connection.execute(sa.insert(model), rows)


def insert_new(connection: sa.Connection, model: type[Base], rows: Rows) -> None:
    """Insert the dimension rows that are not there yet. Keys are content hashes, so equal keys are equal rows."""
    keys = sa.inspect(model).primary_key
    new = {tuple(row[key.name] for key in keys): row for row in rows}  # once each: most rows of a batch share theirs
    if new:
        # in one order, or two writers would wait for each other's locks
        ordered = [new[key] for key in sorted(new)]
        dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
        connection.execute(dialect.insert(model).on_conflict_do_nothing(), ordered)


def known_payloads(connection: sa.Connection, shas: Sequence[str]) -> dict[str, str]:
    """The rows of the payloads that are in already."""
    log = models.IngestLog
    known: dict[str, str] = {}
    for start in range(0, len(shas), IN_ONE_QUERY):
        query = sa.select(log.source_sha, log.cell_run_id).where(log.source_sha.in_(shas[start : start + IN_ONE_QUERY]))
        known.update({row.source_sha: row.cell_run_id for row in connection.execute(query)})
    return known


def insert_entries(connection: sa.Connection, run_id: str, entries: Sequence[tuple[Entry, str]]) -> None:
    """Every fact of `entries`, which come with the hashes of their payloads, with the dimensions they name."""
    if not entries:
        return
    blocks = planned_blocks(connection, run_id)
    rows = [cell_run_row(run_id, entry, blocks) for entry, _ in entries]
    refuse_second(connection, run_id, rows)
    outcomes = [(entry.id, entry.outcome) for entry, _ in entries]
    provenances = [outcome.provenance for _, outcome in outcomes if outcome.provenance]
    names = {name for _, outcome in outcomes for name in outcome.metrics}
    names |= {comparison.metric for entry, _ in entries for comparison in entry.comparisons}
    asked = [item_rows(row_id, outcome) for row_id, outcome in outcomes]
    insert_new(connection, models.Environment, [environment_row(provenance) for provenance in provenances])
    insert_new(connection, models.Metric, [metric_row(name) for name in names])
    insert_new(connection, models.Item, [row for items, _ in asked for row in items])
    insert(connection, models.CellRun, rows)
    insert(connection, models.Measurement, [row for row_id, out in outcomes for row in measurement_rows(row_id, out)])
    insert(connection, models.SampleBlock, [row for row_id, out in outcomes for row in sample_rows(row_id, out)])
    insert(connection, models.ItemResult, [row for _, answers in asked for row in answers])
    now = utc_now()
    log = [{"source_sha": sha, "cell_run_id": entry.id, "ingested_at": now} for entry, sha in entries]
    insert(connection, models.IngestLog, log)
    insert(connection, models.Comparison, comparison_rows(connection, run_id, entries))


def planned_blocks(connection: sa.Connection, run_id: str) -> dict[tuple[str, int], str]:
    block = models.Block
    query = sa.select(block.cell_id, block.number, block.id).where(block.run_id == run_id)
    return {(cell_id, number): block_id for cell_id, number, block_id in connection.execute(query)}


def cell_run_row(run_id: str, entry: Entry, blocks: Mapping[tuple[str, int], str]) -> dict[str, Any]:
    cell_id = content_hash(entry.job.cell)
    if (cell_id, entry.job.block) not in blocks:
        raise InvariantError(f"run {run_id} has no block {entry.job.block} of cell {cell_id}: it was not planned")
    return {
        "id": entry.id,
        "run_id": run_id,
        "cell_id": cell_id,
        "arm_id": content_hash(entry.job.arm),
        "block_id": blocks[cell_id, entry.job.block],
        "attempt": entry.attempt,
        "started_at": entry.started_at,
        "void_reason": entry.void_reason,
        **outcome_columns(entry.outcome),
    }


def refuse_second(connection: sa.Connection, run_id: str, rows: Rows) -> None:
    """InvariantError when an attempt of `rows` has ended already."""
    run, wanted = models.CellRun, sorted({row["block_id"] for row in rows})
    key = (run.block_id, run.arm_id, run.attempt)
    ended: dict[tuple[Any, ...], tuple[str, str]] = {}
    for start in range(0, len(wanted), IN_ONE_QUERY):
        where = (run.run_id == run_id, run.block_id.in_(wanted[start : start + IN_ONE_QUERY]))
        found = connection.execute(sa.select(*key, run.id, run.status).where(*where))
        ended.update({tuple(row[:3]): (row.id, row.status) for row in found})
    for row in rows:
        mine = (row["block_id"], row["arm_id"], row["attempt"])
        if mine in ended:
            raise InvariantError(
                f"attempt {row['attempt']} of cell {row['cell_id']}, arm {row['arm_id']} already ended as"
                f" {ended[mine][1]} (row {ended[mine][0]}), now {row['status']}: rows != 1"
            )
        ended[mine] = (row["id"], row["status"])


def comparison_rows(connection: sa.Connection, run_id: str, entries: Sequence[tuple[Entry, str]]) -> Rows:
    log, shas = models.IngestLog, {entry.id: sha for entry, sha in entries}
    rows: Rows = []
    for entry, sha in entries:
        for comparison in entry.comparisons:
            static_id = comparison.static_id
            if static_id not in shas:
                known = connection.scalar(sa.select(log.source_sha).where(log.cell_run_id == static_id))
                shas[static_id] = str(known)
            rows.append(
                {
                    "id": uuid7(),
                    "run_id": run_id,
                    "kind": "AA" if entry.job.arm.label == "replicate" else "AB",
                    "candidate_id": entry.id,
                    "inputs_sha": content_hash([shas[static_id], sha]),
                    "created_at": utc_now(),
                    **{name: getattr(comparison, name) for name in comparison.__struct_fields__},
                }
            )
    return rows
