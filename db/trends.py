"""The two questions of every morning: how has one cell moved, and how do all pairs of last night stand."""

import datetime
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from db import models


class TrendPoint(NamedTuple):
    """One sound row of a cell's history."""

    started_at: datetime.datetime
    run_id: str
    pool: str
    label: str | None
    block: str
    value: float


class NightPair(NamedTuple):
    """One metric of one block, in the static arm and in another."""

    cell_id: str
    arm_id: str
    block: str
    static: float
    other: float


# built once: to build a query takes as long as to answer it
ROW, VALUE = models.CellRun, models.Measurement
OF_METRIC = (VALUE.cell_run_id == ROW.id) & (VALUE.metric == sa.bindparam("metric"))
ARMS = sa.select(models.Arm.id, models.Arm.pool, models.Arm.label, models.Arm.plants)
FACTS = sa.select(ROW.block_id, ROW.arm_id, ROW.attempt, ROW.status, ROW.void_reason, VALUE.value)
TREND = FACTS.add_columns(ROW.started_at, ROW.run_id).outerjoin(VALUE, OF_METRIC)
TREND = TREND.where(ROW.cell_id == sa.bindparam("cell_id"))
NIGHT = FACTS.add_columns(ROW.cell_id).outerjoin(VALUE, OF_METRIC).where(ROW.run_id == sa.bindparam("run_id"))


def cell_trend(engine: sa.Engine, cell_id: str, metric: str) -> list[TrendPoint]:
    """Every passed, sound value of `metric` in the cell's history, oldest first; planted arms apart."""
    with engine.connect() as connection:
        arms = real_arms(connection)
        found = sound(connection.execute(TREND, {"cell_id": cell_id, "metric": metric}).all())
    return [
        TrendPoint(at, run, *arms[arm], block, value)
        for block, arm, _, _, _, value, at, run in sorted(found, key=operator.itemgetter(6))
        if arm in arms
    ]


def night_pairs(engine: sa.Engine, run_id: str, metric: str) -> list[NightPair]:
    """`metric` of every sound pair of the run: each arm beside the static arm of its own block; planted arms apart."""
    with engine.connect() as connection:
        arms = real_arms(connection)
        found = sound(connection.execute(NIGHT, {"run_id": run_id, "metric": metric}).all())
    static = {row[0]: row[5] for row in found if arms.get(row[1]) == ("static", None)}
    return [
        NightPair(cell, arm, block, static[block], value)
        for block, arm, _, _, _, value, cell in found
        if arm in arms and arms[arm] != ("static", None) and block in static
    ]


def sound(rows: Sequence[Any]) -> list[Any]:
    """What may enter a mean: passed, with a value, in a block's latest attempt, which no guard voided.

    Picked here and not in the query, which would look every row's attempts up again.
    """
    latest: dict[tuple[str, str], Any] = {}
    for row in rows:
        before = latest.get(key := (row[0], row[1]))
        if before is None or before[2] < row[2]:
            latest[key] = row
    return [row for row in latest.values() if row[3] == "passed" and row[4] is None and row[5] is not None]


def real_arms(connection: sa.Connection) -> dict[str, tuple[str, str | None]]:
    """(pool, label) of every arm without a planted fault."""
    return {row.id: (row.pool, row.label) for row in connection.execute(ARMS) if not row.plants}
