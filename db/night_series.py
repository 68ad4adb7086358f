"""Nightly series: one mean log ratio per run, cell, arm and metric, and the release that a cell is pinned to."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from db import models
from db.decision_models import Baseline
from db.gate_inputs import Series
from db.runs import is_latest
from suite.records import metric_kind

Key = tuple[str, str, str]  # cell, arm, metric


def read_series(
    connection: sa.Connection,
    judged: sa.Row[Any],
    cells: Sequence[str],
    metrics: Sequence[str],
    nights: int,
    planted: Iterable[str],
) -> dict[str, list[Series]]:
    """The series of the last `nights` ended runs of the judged run's suite, by cell, oldest night first.

    A night counts where it ran in the environment of the newest night of its cell; void blocks do not.
    """
    if not metrics or not cells or nights < 1:
        return {}
    run = models.Run
    query = sa.select(run.id).where(
        run.suite == judged.suite, run.started_at <= judged.started_at, run.state != "running"
    )
    runs = list(connection.scalars(query.order_by(run.started_at.desc(), run.id.desc()).limit(nights)))[::-1]
    ratios = night_ratios(connection, runs, cells, metrics, set(planted))
    pins = read_pins(connection, cells)
    series: dict[str, list[Series]] = {}
    for (cell, arm, metric), by_night in sorted(ratios.items()):
        home = newest(by_night, runs)
        kept = [r for r in runs if (r, home) in by_night]
        value, pinned_run = pins.get((cell, arm, metric, home), (None, None))
        means = tuple(math.fsum(by_night[r, home]) / len(by_night[r, home]) for r in kept)
        series.setdefault(cell, []).append(
            Series(arm=arm, metric=metric, runs=tuple(kept), values=means, pinned=value, pinned_run=pinned_run)
        )
    return series


def newest(by_night: dict[tuple[str, str], list[float]], runs: Sequence[str]) -> str:
    """The environment of the newest night."""
    return max(by_night, key=lambda night: runs.index(night[0]))[1]


def night_ratios(
    connection: sa.Connection, runs: Sequence[str], cells: Sequence[str], metrics: Sequence[str], planted: set[str]
) -> dict[Key, dict[tuple[str, str], list[float]]]:
    """The log ratios of every block against its static row, by cell, arm and metric, then by (run, environment)."""
    row, m, environment, arm = models.CellRun, models.Measurement, models.Environment, models.Arm
    columns = (row.run_id, row.cell_id, row.block_id, row.arm_id, environment.comparable_hash, m.metric, m.value)
    query = sa.select(*columns).join(m, m.cell_run_id == row.id)
    query = query.join(environment, row.environment_id == environment.id).where(
        row.run_id.in_(runs),
        row.cell_id.in_(cells),
        row.status == "passed",
        row.void_reason.is_(None),
        m.metric.in_(metrics),
        m.stat == "value",
        is_latest(),
    )
    arms = {a.id: a for a in connection.execute(sa.select(arm)) if a.id not in planted}
    static = {key for key, a in arms.items() if a.pool == "static" and a.label is None}
    blocks: dict[tuple[str, str], dict[str, tuple[str, str, str, float]]] = {}
    for run_id, cell_id, block_id, arm_id, home, metric, value in connection.execute(query.order_by(row.id)):
        if arm_id in arms:
            blocks.setdefault((block_id, metric), {})[arm_id] = (run_id, cell_id, home, value)
    ratios: dict[Key, dict[tuple[str, str], list[float]]] = {}
    for (_, metric), members in blocks.items():
        base = next((members[key] for key in members if key in static), None)
        for arm_id, (run_id, cell_id, home, value) in members.items():
            if arm_id in static or base is None or base[2] != home:
                continue
            ratio = log_ratio(base[3], value, metric_kind(metric).better)
            if ratio is not None:
                ratios.setdefault((cell_id, arm_id, metric), {}).setdefault((run_id, home), []).append(ratio)
    return ratios


def log_ratio(static: float, candidate: float, better: str) -> float | None:
    """log(candidate / static), positive where the candidate is worse; None where either is no positive number."""
    if not (0.0 < static < math.inf and 0.0 < candidate < math.inf):
        return None
    ratio = math.log(candidate / static)
    return ratio if better == "lower" else -ratio


def read_pins(connection: sa.Connection, cells: Sequence[str]) -> dict[tuple[str, str, str, str], tuple[float, str]]:
    """The newest pin of every (cell, arm, metric, environment): its value and its run."""
    columns = (Baseline.cell_id, Baseline.arm_id, Baseline.metric, Baseline.comparable_hash)
    query = sa.select(*columns, Baseline.value, Baseline.run_id).where(Baseline.cell_id.in_(cells))
    pins: dict[tuple[str, str, str, str], tuple[float, str]] = {}
    for *key, value, run_id in connection.execute(query.order_by(Baseline.pinned_at, Baseline.id)):
        pins[tuple(key)] = (value, run_id)  # type: ignore[index]
    return pins
