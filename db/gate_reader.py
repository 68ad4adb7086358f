"""Reading what a gate decides from: the rows of a run and of those it appends to, and the nights before it.

A run appends to the earlier runs of its matrix at the same revision: a second try adds blocks to the same
test, it never replaces the first. Runs with planted faults append to nothing; how those faults ended is
read for itself.
"""

import datetime
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import sqlalchemy as sa

from db import models
from db.gate_inputs import ArmRows, CellRows, Exact, Inputs, Number, PlantedRow, Row, answer_text, number
from db.night_series import read_series
from db.queries import cell_name
from db.runs import is_latest
from suite.errors import InputError
from suite.records import Cell, Samples

COUNTERS = ("accept_tokens", "verify_passes", "accepted_at", "proposed_at")
Facts = dict[str, Any]


def read_inputs(engine: sa.Engine, run_id: str, history: Sequence[str] = (), nights: int = 0) -> Inputs:
    """The inputs of a decision on run `run_id`, with `nights` of series of the metrics in `history`.

    InputError for a row whose time has lost its offset.
    """
    run = models.Run
    with engine.connect() as connection:
        judged = connection.execute(sa.select(run).where(run.id == run_id)).one()
        planted = planted_arms(connection)
        runs = appended_runs(connection, judged, planted)
        cells = read_cells(connection, runs, planted)
        series = read_series(connection, judged, [cell.id for cell in cells], history, nights, planted)
        return Inputs(
            run=run_id,
            suite=judged.suite,
            code_rev=judged.code_rev_id,
            state=judged.state,
            runs=tuple(runs),
            cells=tuple(msgspec.structs.replace(cell, series=tuple(series.get(cell.id, ()))) for cell in cells),
            planted=tuple(planted_rows(connection, judged.code_rev_id, planted)),
        )


def planted_arms(connection: sa.Connection) -> set[str]:
    """The keys of arms with a planted fault. Few, and told apart here: databases compare JSON each in its own way."""
    arm = models.Arm
    return {key for key, plants in connection.execute(sa.select(arm.id, arm.plants)) if plants}


def appended_runs(connection: sa.Connection, judged: sa.Row[Any], planted: set[str]) -> list[str]:
    """The ended runs that are one test with the judged one, oldest first, it being the last."""
    run, row = models.Run, models.CellRun
    query = sa.select(run.id).where(
        run.suite == judged.suite,
        run.code_rev_id == judged.code_rev_id,
        run.started_at <= judged.started_at,
        run.state != "running",
        run.id != judged.id,
        ~sa.exists().where(row.run_id == run.id, row.arm_id.in_(planted)),
    )
    return [*connection.scalars(query.order_by(run.started_at, run.id)), judged.id]


def planted_rows(connection: sa.Connection, code_rev: str, planted: set[str]) -> list[PlantedRow]:
    """How every row with a planted fault ended at this revision."""
    row, run, arm = models.CellRun, models.Run, models.Arm
    query = sa.select(arm.plants, row.run_id, row.status).join(run, row.run_id == run.id)
    query = query.join(arm, row.arm_id == arm.id).where(
        row.arm_id.in_(planted), run.code_rev_id == code_rev, is_latest()
    )
    found = connection.execute(query.order_by(row.id))
    return [PlantedRow(fault=" + ".join(plants), run=run_id, status=status) for plants, run_id, status in found]


def read_cells(connection: sa.Connection, runs: Sequence[str], planted: set[str]) -> list[CellRows]:
    """Every cell that the runs planned, with its arms, in the order of their keys."""
    block, cell, arm = models.Block, models.Cell, models.Arm
    plan: dict[str, dict[str, list[tuple[str, int]]]] = {}
    query = sa.select(block.cell_id, block.arm_order, block.run_id, block.number).where(block.run_id.in_(runs))
    for cell_id, arm_order, run_id, number_ in connection.execute(query.order_by(block.id)):
        for arm_id in arm_order:
            plan.setdefault(cell_id, {}).setdefault(arm_id, []).append((run_id, number_))
    items, rows = read_rows(connection, runs)
    cells = {c.id: c for c in connection.execute(sa.select(cell).where(cell.id.in_(plan)))}
    arms = {a.id: a for a in connection.execute(sa.select(arm))}
    return [
        CellRows(
            id=cell_id,
            name=cell_name(SimpleNamespace(**cells[cell_id]._mapping, cell_id=cell_id, plants=())),
            family=cells[cell_id].family,
            fields=cell_fields(cells[cell_id].params),
            tasks=tuple(task for task, _ in items.get(cell_id, ())),
            arms=tuple(
                ArmRows(
                    id=arm_id,
                    pool=arms[arm_id].pool,
                    label=arms[arm_id].label,
                    plants=tuple(arms[arm_id].plants),
                    planned=tuple(planned),
                    rows=tuple(rows.get((cell_id, arm_id), ())),
                )
                for arm_id, planned in sorted(plan[cell_id].items())
            ),
            series=(),
        )
        for cell_id in sorted(plan)
    ]


def cell_fields(params: dict[str, Any]) -> dict[str, Any]:
    """The fields of a cell by which a policy selects, a workload by its name."""
    cell = msgspec.convert(params, Cell)
    fields = {name: getattr(cell, name) for name in Cell.__struct_fields__}
    return {name: getattr(value, "name", value) for name, value in fields.items()}


def read_rows(
    connection: sa.Connection, runs: Sequence[str]
) -> tuple[dict[str, list[tuple[str, str]]], dict[tuple[str, str], list[Row]]]:
    """The (task, item) pairs of every cell, and the rows of every (cell, arm), latest attempts only."""
    row, block, environment = models.CellRun, models.Block, models.Environment
    query = sa.select(row, block.number, environment.comparable_hash, environment.device_name)
    query = query.join(block, row.block_id == block.id).outerjoin(environment, row.environment_id == environment.id)
    found = connection.execute(query.where(row.run_id.in_(runs), is_latest()).order_by(row.id)).all()
    cells = {r.id: r.cell_id for r in found}
    values = read_values(connection, runs)
    exact = read_exact(connection, runs)
    counters = read_counters(connection, runs)
    items, answers = read_answers(connection, runs, cells)
    rows: dict[tuple[str, str], list[Row]] = {}
    for r in found:
        rows.setdefault((r.cell_id, r.arm_id), []).append(
            Row(
                id=r.id,
                run=r.run_id,
                block=r.number,
                attempt=r.attempt,
                started_at=aware(r.started_at).isoformat(),
                values=values.get(r.id, {}),
                answers=tuple(answer_text(keys_of(items, r.cell_id), a) for a in answers.get(r.id, ())),
                exact=tuple(exact.get(r.id, ())),
                counters=counters.get(r.id, {}),
                **{name: getattr(r, name) for name in ROW_COLUMNS},
            )
        )
    return items, rows


ROW_COLUMNS = (
    *("status", "reason_code", "reason", "void_reason"),
    *("launcher", "prompt_hash", "comparable_hash", "device_name"),
)


def keys_of(items: dict[str, list[tuple[str, str]]], cell_id: str) -> list[str]:
    return [key for _, key in items.get(cell_id, ())]


def aware(time: datetime.datetime) -> datetime.datetime:
    """`time`, unless it is somebody's local one."""
    if time.tzinfo is None:
        raise InputError("started_at", time.isoformat(), "a time with its offset from UTC")
    return time


def of_runs(query: Any, column: Any, runs: Sequence[str]) -> Any:
    """`query` for rows of the runs, `column` being the key of a row."""
    row = models.CellRun
    return query.join(row, column == row.id).where(row.run_id.in_(runs))


def read_values(connection: sa.Connection, runs: Sequence[str]) -> dict[str, dict[str, Number]]:
    m = models.Measurement
    values: dict[str, dict[str, Number]] = {}
    query = of_runs(sa.select(m.cell_run_id, m.metric, m.value).where(m.stat == "value"), m.cell_run_id, runs)
    for row_id, metric, value in connection.execute(query):
        values.setdefault(row_id, {})[metric] = number(value)
    return values


def read_exact(connection: sa.Connection, runs: Sequence[str]) -> dict[str, list[Exact]]:
    c = models.Comparison
    exact: dict[str, list[Exact]] = {}
    query = of_runs(sa.select(c.candidate_id, c.metric, c.effect, c.verdict), c.candidate_id, runs)
    for row_id, metric, effect, verdict in connection.execute(query.order_by(c.metric, c.id)):
        exact.setdefault(row_id, []).append(Exact(metric=metric, effect=number(effect), verdict=verdict))
    return exact


def read_counters(connection: sa.Connection, runs: Sequence[str]) -> dict[str, Facts]:
    s = models.SampleBlock
    counters: dict[str, Facts] = {}
    columns = (s.cell_run_id, s.metric, s.shape, s.data, s.sha256, s.codec)
    query = of_runs(sa.select(*columns).where(s.metric.in_(COUNTERS), s.seq == 0), s.cell_run_id, runs)
    for row_id, metric, shape, data, sha256, codec in connection.execute(query):
        samples = Samples(metric=metric, shape=tuple(shape), data=data, sha256=sha256, codec=codec)
        try:
            counters.setdefault(row_id, {})[metric] = numbers(samples.unpack().tolist())
        except ValueError as error:
            raise InputError(f"samples.{metric}", row_id, f"the bytes that were stored ({error})") from error
    return counters


def numbers(values: Any) -> Any:
    """Nested lists of floats as JSON can keep them."""
    return [numbers(value) for value in values] if isinstance(values, list) else number(values)


def read_answers(
    connection: sa.Connection, runs: Sequence[str], cells: dict[str, str]
) -> tuple[dict[str, list[tuple[str, str]]], dict[str, list[dict[str, bool]]]]:
    """The sorted (task, item) pairs of every cell, and each row's answers by item, one mapping per repeat."""
    result, item = models.ItemResult, models.Item
    columns = (result.cell_run_id, result.item_id, result.repeat, result.correct, item.task)
    query = of_runs(sa.select(*columns).join(item, result.item_id == item.id), result.cell_run_id, runs)
    asked: dict[str, set[tuple[str, str]]] = {}
    answers: dict[str, list[dict[str, bool]]] = {}
    for row_id, key, repeat, correct, task in connection.execute(query.order_by(result.repeat)):
        if row_id in cells:
            asked.setdefault(cells[row_id], set()).add((task, key))
            repeats = answers.setdefault(row_id, [])
            repeats.extend({} for _ in range(repeat + 1 - len(repeats)))
            repeats[repeat][key] = bool(correct)
    return {cell: sorted(pairs) for cell, pairs in asked.items()}, answers
