"""Reading runs: how far one is, which attempts count, and how long arms took before."""

from collections import Counter
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import aliased

from db import models
from suite.records import Status


class Attempt(NamedTuple):
    """The latest attempt at a block: its number, and why its arms ended where they did not pass."""

    number: int
    reason_codes: frozenset[str]


def is_latest() -> sa.ColumnElement[bool]:
    """That a cell_run is of its block's latest attempt; the earlier ones are history."""
    row, other = models.CellRun, aliased(models.CellRun)
    same = (getattr(other, key) == getattr(row, key) for key in ("run_id", "cell_id", "arm_id", "block_id"))
    latest = sa.select(sa.func.max(other.attempt)).where(*same).correlate(row).scalar_subquery()
    return row.attempt == latest


def run_record(engine: sa.Engine, run_id: str) -> Any:
    """Every column of the run, with `sha` and `patch_sha` of its revision."""
    run, rev = models.Run, models.CodeRev
    query = sa.select(*run.__table__.columns, rev.sha, rev.patch_sha).join(rev, run.code_rev_id == rev.id)
    with engine.connect() as connection:
        return connection.execute(query.where(run.id == run_id)).one()


def latest_attempts(engine: sa.Engine, run_id: str) -> dict[tuple[str, int], Attempt]:
    """The latest attempt at each block that has rows, by the key of its cell and its number."""
    row, block = models.CellRun, models.Block
    query = sa.select(row.cell_id, block.number, row.attempt, row.reason_code).join(block, row.block_id == block.id)
    found: dict[tuple[str, int], Attempt] = {}
    with engine.connect() as connection:
        for cell_id, number, attempt, code in connection.execute(query.where(row.run_id == run_id, is_latest())):
            before = found.get((cell_id, number), Attempt(attempt, frozenset()))
            found[cell_id, number] = Attempt(attempt, before.reason_codes | ({code} if code else set()))
    return found


def run_counts(engine: sa.Engine, run_id: str) -> Counter[Status]:
    """How many rows of the run's latest attempts ended with each status."""
    return counts(engine, run_id, models.CellRun.status)


def reason_counts(engine: sa.Engine, run_id: str) -> Counter[Any]:
    """How many rows of the run's latest attempts have each reason code."""
    return counts(engine, run_id, models.CellRun.reason_code)


def counts(engine: sa.Engine, run_id: str, column: Any) -> Counter[Any]:
    query = sa.select(column, sa.func.count()).where(models.CellRun.run_id == run_id, is_latest()).group_by(column)
    with engine.connect() as connection:
        return Counter({row[0]: row[1] for row in connection.execute(query)})


def typical_durations(engine: sa.Engine) -> dict[tuple[str, str], float]:
    """Mean seconds that each arm of each cell took to pass, by their keys."""
    row = models.CellRun
    query = sa.select(row.cell_id, row.arm_id, sa.func.avg(row.duration_s)).where(row.status == "passed")
    with engine.connect() as connection:
        found = connection.execute(query.group_by(row.cell_id, row.arm_id))
        return {(cell_id, arm_id): float(seconds) for cell_id, arm_id, seconds in found}
