"""Reading results: which run, and its rows.

Rows come back as plain dictionaries of the shape that `kvproof show --json` prints; only a block's latest
attempt counts. A cell is named by what a reader tells cells apart by and the first digits of its key; a
planted fault is part of the name, so that no planted row can pass for a real one.
"""

from collections.abc import Iterable
from pathlib import PurePath
from typing import Any, NamedTuple, TypedDict

import sqlalchemy as sa

from db import models
from db.runs import is_latest
from suite.errors import InputError, UnknownNameError
from suite.records import METRICS


class Value(TypedDict):
    """One measured value."""

    value: float
    unit: str
    n: int


class ShowRow(TypedDict):
    """How one arm of one cell ended."""

    cell: str
    family: str
    model: str
    backend: str
    pool: str
    label: str | None
    launcher: str
    block: int
    attempt: int
    status: str
    reason: str | None
    void_reason: str | None
    metrics: dict[str, Value]


class Ended(NamedTuple):
    """One cell_run with its names and numbers."""

    cell_id: str
    block: int
    plants: list[str]
    show: ShowRow

    @property
    def is_reference(self) -> bool:
        """Whether the other arms of its cell are held to this row's."""
        return self.show["pool"] == "static" and not self.plants and self.show["label"] is None


def find_run(engine: sa.Engine, run: str | None = None) -> str:
    """The id of `run`, an id or its unique beginning; the latest when None. InputError when there is none."""
    table = models.Run
    with engine.connect() as connection:
        latest = connection.scalar(sa.select(table.id).order_by(table.started_at.desc(), table.id.desc()).limit(1))
        if latest is None:
            raise InputError("run", run, "a run of this database, which has none; `kvproof run` makes one")
        if run is None:
            return latest
        found = connection.scalars(sa.select(table.id).where(table.id.startswith(run, autoescape=True)).limit(2)).all()
    if len(found) != 1 or not run:
        many = "more than one begins so" if found else f"the latest is {latest}"
        raise InputError("run", run, f"the id of a run or its unique beginning; {many}")
    return found[0]


def show_rows(engine: sa.Engine, run_id: str, metric: str | None = None) -> list[ShowRow]:
    """The latest attempts' rows in the order in which they were written, with all metrics or only `metric`."""
    rows = [ended.show for ended in ended_rows(engine, run_id)]
    if metric is not None:
        check_metric_name(metric, rows)
        for row in rows:
            row["metrics"] = {name: value for name, value in row["metrics"].items() if name == metric}
    return rows


def metric_order(name: str) -> tuple[int, str]:
    """The order in which metrics are listed: that of METRICS, unknown ones last."""
    base = name.partition(".")[0]
    return (list(METRICS).index(base) if base in METRICS else len(METRICS), name)


def check_metric_name(metric: str, rows: Iterable[ShowRow]) -> None:
    known = {*METRICS, *(name for row in rows for name in row["metrics"])}
    if metric not in known:
        raise UnknownNameError("metric", metric, known)


def cell_name(row: Any) -> str:
    """`gpt-oss-mini/fa3/native/cuda/bfloat16/page16/graph/mini/1a2b3c4d5e6f`, a planted fault appended as `+FAULT`."""
    graph = "graph" if row.graph else "eager"
    parts = (PurePath(row.model).name, row.backend, row.launcher, row.device, row.dtype, f"page{row.page_size}", graph)
    return "+".join(["/".join((*parts, row.workload, row.cell_id[:12])), *row.plants])


def ended_rows(engine: sa.Engine, run_id: str) -> list[Ended]:
    """The rows of every block's latest attempt, in the order in which they were written."""
    row, cell, arm, block = models.CellRun, models.Cell, models.Arm, models.Block
    columns = (row.id, row.status, row.reason_code, row.reason, row.launcher.label("executed"), row.cell_id)
    columns += (row.attempt, row.void_reason, arm.label.label("arm_label"))  # type: ignore[assignment]
    columns += (cell.family, cell.model, cell.backend, cell.launcher, cell.workload)  # type: ignore[assignment]
    columns += (cell.device, cell.dtype, cell.page_size, cell.graph)  # type: ignore[assignment]
    query = sa.select(*columns, arm.pool, arm.plants, block.number)
    query = query.where(row.run_id == run_id, is_latest())
    query = query.join(cell, row.cell_id == cell.id).join(arm, row.arm_id == arm.id)
    query = query.join(block, row.block_id == block.id).order_by(row.id)
    with engine.connect() as connection:
        values = run_values(connection, run_id)
        found = connection.execute(query).all()
    return [Ended(r.cell_id, r.number, r.plants, show_row(r, values.get(r.id, {}))) for r in found]


def show_row(row: Any, metrics: dict[str, Value]) -> ShowRow:
    return ShowRow(
        cell=cell_name(row),
        family=row.family,
        model=row.model,
        backend=row.backend,
        pool=row.pool,
        label=row.arm_label,
        launcher=row.executed or row.launcher,
        block=row.number,
        attempt=row.attempt,
        status=row.status,
        reason=": ".join(part for part in (row.reason_code, row.reason) if part) or None,
        void_reason=row.void_reason,
        metrics={name: metrics[name] for name in sorted(metrics, key=metric_order)},
    )


def run_values(connection: sa.Connection, run_id: str) -> dict[str, dict[str, Value]]:
    """The measurements of every row of the run, by row id and metric."""
    m, row, metric = models.Measurement, models.CellRun, models.Metric
    query = sa.select(m.cell_run_id, m.metric, m.value, metric.unit, m.n).join(row, m.cell_run_id == row.id)
    query = query.join(metric, m.metric == metric.name).where(row.run_id == run_id)
    values: dict[str, dict[str, Value]] = {}
    for row_id, name, value, unit, n in connection.execute(query):
        values.setdefault(row_id, {})[name] = Value(value=value, unit=unit, n=n)
    return values
