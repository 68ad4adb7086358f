"""The one writer of results.

A run is announced whole, with its plan; then each outcome is ingested in one transaction: the row,
its measurements, samples, items and comparisons, and a note that this payload is in. The same payload
twice is one row; a different one for the same attempt is refused.
"""

import datetime
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from db import models
from db.checks import check_outcome
from db.keys import utc_now, uuid7
from db.rows import (
    Rows,
    arm_row,
    block_rows,
    cell_row,
    environment_row,
    item_rows,
    metric_row,
    payload_sha,
    sample_rows,
)
from db.session import writer
from suite.errors import InvariantError
from suite.provenance import CodeRevision
from suite.records import CellJob, Outcome, Record, content_hash

OUTCOME_COLUMNS = (
    *("status", "reason_code", "reason", "launcher", "effective"),
    *("prompt_hash", "duration_s", "exit_code", "signal", "stderr_tail"),
)
VALUE = "value"  # the only statistic of a metric so far; intervals and quantiles will be others


class Comparison(Record, frozen=True):
    """A verdict over the static row `static_id` and the row it is ingested with."""

    static_id: str
    metric: str
    method: str
    version: int
    effect: float | None
    verdict: str


class Store:
    """Writes runs and rows into one database."""

    def __init__(self, engine: sa.Engine) -> None:
        self.engine = writer(engine)

    def begin_run(self, suite: str, plan: dict[str, Any], jobs: Sequence[CellJob], revision: CodeRevision) -> str:
        """Announce a run of `jobs`; returns its id."""
        run_id = uuid7()
        rev = {"repo": revision.repo, "sha": revision.sha, "patch_sha": revision.patch_sha}
        code_rev = {"id": content_hash(rev), **rev, "branch": revision.branch, "dirty": revision.dirty}
        run = {
            "id": run_id,
            "suite": suite,
            "code_rev_id": code_rev["id"],
            "plan_sha": content_hash(plan),
            "plan": plan,
            "planned": len(jobs),
            "state": "running",
            "started_at": utc_now(),
        }
        with self.engine.begin() as connection:
            insert_new(connection, models.CodeRev, [code_rev])
            insert_new(connection, models.Cell, [cell_row(job) for job in jobs])
            insert_new(connection, models.Arm, [arm_row(job) for job in jobs])
            insert(connection, models.Run, [run])
            insert(connection, models.Block, block_rows(run_id, jobs))
        return run_id

    def ingest(
        self,
        run_id: str,
        job: CellJob,
        outcome: Outcome,
        *,
        started_at: datetime.datetime,
        attempt: int = 1,
        comparisons: Sequence[Comparison] = (),
    ) -> str:
        """Make `outcome` the row of `job`, whole or not at all; returns the row's id.

        Raises InputError for an outcome that no row may have (see `check_outcome`), InvariantError when
        the attempt already ended otherwise.
        """
        check_outcome(outcome)
        source_sha = payload_sha(run_id, job, attempt, outcome)
        with self.engine.begin() as connection:
            log = models.IngestLog
            known = connection.scalar(sa.select(log.cell_run_id).where(log.source_sha == source_sha))
            if known is not None:
                return known
            row = cell_run_row(connection, run_id, job, outcome, started_at, attempt)
            refuse_second(connection, row)
            if outcome.provenance is not None:
                insert_new(connection, models.Environment, [environment_row(outcome.provenance)])
            insert(connection, models.CellRun, [row])
            insert_facts(connection, row["id"], outcome)
            insert(connection, log, [{"source_sha": source_sha, "cell_run_id": row["id"], "ingested_at": utc_now()}])
            insert(
                connection, models.Comparison, comparison_rows(connection, run_id, row["id"], source_sha, comparisons)
            )
        return str(row["id"])

    def end_run(self, run_id: str, state: str) -> None:
        """Close the run: "finished", "interrupted" or "failed"."""
        run = models.Run
        with self.engine.begin() as connection:
            connection.execute(sa.update(run).where(run.id == run_id).values(state=state, finished_at=utc_now()))


def insert(connection: sa.Connection, model: type[models.Base], rows: Rows) -> None:
    if rows:
        connection.execute(sa.insert(model), rows)


def insert_new(connection: sa.Connection, model: type[models.Base], rows: Rows) -> None:
    """Insert the dimension rows that are not there yet. Keys are content hashes, so equal keys are equal rows."""
    if rows:
        dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
        connection.execute(dialect.insert(model).on_conflict_do_nothing(), rows)


def cell_run_row(
    connection: sa.Connection, run_id: str, job: CellJob, outcome: Outcome, started_at: datetime.datetime, attempt: int
) -> dict[str, Any]:
    block = models.Block
    cell_id = content_hash(job.cell)
    where = (block.run_id == run_id, block.cell_id == cell_id, block.number == job.block)
    block_id = connection.scalar(sa.select(block.id).where(*where))
    if block_id is None:
        raise InvariantError(f"run {run_id} has no block {job.block} of cell {cell_id}: it was not planned")
    provenance = outcome.provenance
    return {
        "id": uuid7(),
        "run_id": run_id,
        "cell_id": cell_id,
        "arm_id": content_hash(job.arm),
        "block_id": block_id,
        "attempt": attempt,
        "started_at": started_at,
        "environment_id": environment_row(provenance)["id"] if provenance else None,
        "revision": provenance.commit if provenance else None,
        "dirty": provenance.dirty if provenance else None,
        **{name: getattr(outcome, name) for name in OUTCOME_COLUMNS},
    }


def refuse_second(connection: sa.Connection, row: dict[str, Any]) -> None:
    run = models.CellRun
    key = ("run_id", "cell_id", "arm_id", "block_id", "attempt")
    found = connection.execute(sa.select(run.id, run.status).where(*(getattr(run, k) == row[k] for k in key))).first()
    if found is not None:
        raise InvariantError(
            f"attempt {row['attempt']} of cell {row['cell_id']}, arm {row['arm_id']} already ended as {found.status}"
            f" (row {found.id}), now {row['status']}: rows != 1"
        )


def insert_facts(connection: sa.Connection, row_id: str, outcome: Outcome) -> None:
    """The measurements, samples and items of one row, with the metrics and items they name."""
    insert_new(connection, models.Metric, [metric_row(name) for name in outcome.metrics])
    values = [
        {"cell_run_id": row_id, "metric": name, "stat": VALUE, "value": metric.value, "n": metric.n}
        for name, metric in outcome.metrics.items()
    ]
    insert(connection, models.Measurement, values)
    insert(connection, models.SampleBlock, sample_rows(row_id, outcome))
    items, results = item_rows(row_id, outcome)
    insert_new(connection, models.Item, items)
    insert(connection, models.ItemResult, results)


def comparison_rows(
    connection: sa.Connection, run_id: str, row_id: str, source_sha: str, comparisons: Sequence[Comparison]
) -> Rows:
    log = models.IngestLog
    rows = []
    for comparison in comparisons:
        insert_new(connection, models.Metric, [metric_row(comparison.metric)])
        static_sha = connection.scalar(sa.select(log.source_sha).where(log.cell_run_id == comparison.static_id))
        rows.append(
            {
                "id": uuid7(),
                "run_id": run_id,
                "kind": "AB",
                "candidate_id": row_id,
                "inputs_sha": content_hash([static_sha, source_sha]),
                "created_at": utc_now(),
                **{name: getattr(comparison, name) for name in comparison.__struct_fields__},
            }
        )
    return rows
