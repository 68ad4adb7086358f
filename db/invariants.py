"""What must hold in every results database, and which rows break it.

The database itself refuses most of it when a row is written. Here it is asked of what is there, whoever
wrote it: keys are the hashes of contents, samples are the bytes that were packed, an attempt at a block is
whole, nothing that did not pass has a time, a run that ended has every row it planned.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypedDict

import sqlalchemy as sa
from sqlalchemy.orm import aliased

from db import models
from db.runs import is_latest
from suite.records import SAMPLE_DTYPES, Arm, Samples, content_hash


class Broken(TypedDict):
    """One row that breaks one invariant."""

    invariant: str
    row: str
    found: str


Check = Callable[[sa.Connection], Iterator[tuple[str, str]]]


def broken_rows(engine: sa.Engine) -> list[Broken]:
    """Every row that breaks an invariant; none in a sound database."""
    with engine.connect() as connection:
        return [
            Broken(invariant=name, row=row, found=found)
            for name, check in CHECKS.items()
            for row, found in check(connection)
        ]


def sqlite_is_sound(connection: sa.Connection) -> Iterator[tuple[str, str]]:
    if connection.dialect.name != "sqlite":
        return
    for (said,) in connection.exec_driver_sql("PRAGMA integrity_check"):
        if said != "ok":
            yield "database", said
    for table, row, parent, _ in connection.exec_driver_sql("PRAGMA foreign_key_check"):
        yield f"{table} rowid {row}", f"refers to a row of {parent} that is not there"


def keys_are_hashes(connection: sa.Connection) -> Iterator[tuple[str, str]]:
    cell, arm, env = models.Cell, models.Arm, models.Environment
    rev, item, run = models.CodeRev, models.Item, models.Run
    for table, columns, content in (
        (cell, (cell.id, cell.params), lambda r: r.params),
        (
            arm,
            (arm.id, arm.pool, arm.plants, arm.label),
            lambda r: Arm(pool=r.pool, plants=tuple(r.plants), label=r.label),
        ),
        (env, (env.id, env.document), lambda r: r.document),
        (rev, (rev.id, rev.repo, rev.sha, rev.patch_sha), named("repo", "sha", "patch_sha")),
        (
            item,
            (item.id, item.task, item.doc_hash, item.prompt_hash, item.target_hash),
            named("task", "doc_hash", "prompt_hash", "target_hash"),
        ),
        (run, (run.plan_sha.label("id"), run.plan), lambda r: r.plan),
    ):
        for row in connection.execute(sa.select(*columns)):
            if (key := content_hash(content(row))) != row.id:
                yield f"{table.__tablename__} {row.id}", f"its content hashes to {key}"


def named(*names: str) -> Callable[[Any], dict[str, Any]]:
    return lambda row: {name: getattr(row, name) for name in names}


def samples_are_whole(connection: sa.Connection) -> Iterator[tuple[str, str]]:
    columns = models.SampleBlock.__table__.columns
    for row in connection.execution_options(yield_per=1000).execute(sa.select(*columns)):
        if found := broken_samples(row):
            yield f"sample_block {row.cell_run_id}/{row.metric}/{row.seq}", found


def broken_samples(row: Any) -> str | None:
    """What is wrong with one block of samples; None when it is whole."""
    if row.codec not in SAMPLE_DTYPES:
        return f"the codec {row.codec}, known are {', '.join(SAMPLE_DTYPES)}"
    packed = Samples(metric=row.metric, shape=tuple(row.shape), data=row.data, sha256=row.sha256, codec=row.codec)
    try:
        size = packed.unpack().size
    except Exception as error:  # zlib, numpy and the hash each have their own
        return str(error)
    return None if size == row.n else f"n {row.n} != {size} samples"


def only_passed_rows_have_times(connection: sa.Connection) -> Iterator[tuple[str, str]]:
    row, value, metric = models.CellRun, models.Measurement, models.Metric
    query = sa.select(row.id, row.status, value.metric).join(value, value.cell_run_id == row.id)
    query = query.join(metric, metric.name == value.metric).where(metric.timing, row.status != "passed")
    for row_id, status, name in connection.execute(query):
        yield f"cell_run {row_id}", f"{status}, with {name}"


def rows_are_of_their_block(connection: sa.Connection) -> Iterator[tuple[str, str]]:
    row, block = models.CellRun, models.Block
    query = sa.select(row.id, row.run_id, row.cell_id, row.arm_id, row.block_id)
    query = query.add_columns(block.run_id.label("its_run"), block.cell_id.label("its_cell"), block.arm_order)
    for found in connection.execute(query.join(block, row.block_id == block.id)):
        same = (found.run_id, found.cell_id) == (found.its_run, found.its_cell)
        if not same or found.arm_id not in found.arm_order:
            yield f"cell_run {found.id}", f"its run, cell or arm is not of block {found.block_id}"


def attempts_are_whole(connection: sa.Connection) -> Iterator[tuple[str, str]]:
    """Each attempt has every arm of its block, with one void reason, and follows the one before it."""
    row, block = models.CellRun, models.Block
    attempt = sa.select(row.block_id, row.attempt, sa.func.count(sa.distinct(row.arm_id)).label("arms"))
    attempt = attempt.add_columns(sa.func.count(row.void_reason).label("void"), sa.func.count().label("rows"))
    attempt = attempt.add_columns(sa.func.count(sa.distinct(row.void_reason)).label("reasons"))
    each = attempt.group_by(row.block_id, row.attempt).subquery()
    query = sa.select(each, block.arm_order).join(block, each.c.block_id == block.id)
    last: dict[str, int] = {}
    for found in connection.execute(query.order_by(each.c.block_id, each.c.attempt)):
        name = f"block {found.block_id} attempt {found.attempt}"
        if found.arms != len(found.arm_order):
            yield name, f"arms {found.arms} != {len(found.arm_order)} planned"
        if found.void not in (0, found.rows) or found.reasons > 1:
            yield name, f"void rows {found.void} != {found.rows} rows, or for several reasons"
        if found.attempt != last.get(found.block_id, 0) + 1:
            yield name, f"attempt {found.attempt} != {last.get(found.block_id, 0)} + 1"
        last[found.block_id] = found.attempt


def ended_runs_have_every_row(connection: sa.Connection) -> Iterator[tuple[str, str]]:
    run, row = models.Run, models.CellRun
    rows = sa.select(sa.func.count()).where(row.run_id == run.id, is_latest()).correlate(run).scalar_subquery()
    query = sa.select(run.id, run.state, run.planned, rows.label("rows"), run.started_at, run.finished_at)
    for found in connection.execute(query.where(run.state.in_(("finished", "interrupted")))):
        if found.rows != found.planned:
            yield f"run {found.id}", f"{found.state}: rows {found.rows} != {found.planned} planned"
        if found.finished_at is None or found.finished_at < found.started_at:
            yield f"run {found.id}", f"{found.state} at {found.finished_at}, started at {found.started_at}"


def rows_are_logged(connection: sa.Connection) -> Iterator[tuple[str, str]]:
    row, log = models.CellRun, models.IngestLog
    query = sa.select(row.id).outerjoin(log, log.cell_run_id == row.id).where(log.source_sha.is_(None))
    for row_id in connection.scalars(query):
        yield f"cell_run {row_id}", "no payload is noted for it"


def comparisons_pair_up(connection: sa.Connection) -> Iterator[tuple[str, str]]:
    table, a, b = models.Comparison, aliased(models.CellRun), aliased(models.CellRun)
    query = sa.select(table.id, table.effect, table.verdict, a.block_id, b.block_id.label("other"))
    query = query.add_columns(a.attempt, b.attempt.label("other_attempt"))
    query = query.join(a, table.static_id == a.id).join(b, table.candidate_id == b.id)
    for found in connection.execute(query.where(table.method == "bit_identity")):
        if (found.block_id, found.attempt) != (found.other, found.other_attempt):
            yield f"comparison {found.id}", "its two rows are not of one attempt at one block"
        if (found.verdict == "equal") != (found.effect == 0.0):
            yield f"comparison {found.id}", f"{found.verdict} at a distance of {found.effect}"


CHECKS: dict[str, Check] = {
    "the database is sound": sqlite_is_sound,
    "keys are the hashes of contents": keys_are_hashes,
    "samples are what was packed": samples_are_whole,
    "only passed rows have times": only_passed_rows_have_times,
    "rows are of their block": rows_are_of_their_block,
    "attempts are whole": attempts_are_whole,
    "ended runs have every row": ended_runs_have_every_row,
    "every row has its payload noted": rows_are_logged,
    "comparisons pair up": comparisons_pair_up,
}
