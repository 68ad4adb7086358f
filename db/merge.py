"""One history out of many files: what several machines wrote, put into one database.

Facts have keys that are unique everywhere and dimensions are keyed by their content, so merging is
insert what is missing and compare what is there. Merging again changes nothing. Two rows of one key that
differ, or two rows of one attempt, are a conflict: it is named, and nothing of that source is merged.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from db.base import Base
from db.session import writer
from suite.errors import InputError

CHUNK = 1000
MUTABLE = "mutable"  # in a table's info: the columns that the life of a row changes; `running` gives way to its end

Row = dict[str, Any]


def merge(source: sa.Engine, target: sa.Engine, leave_out: Collection[str] = (), where: Any = None) -> Counter[str]:
    """Put every row of `source` into `target`, all or none; how many of each table were new.

    Tables in `leave_out` are left out; `where(table)` may name a condition on a table's rows. Raises InputError
    naming the first row in conflict.
    """
    added: Counter[str] = Counter()
    with source.connect() as reading, writer(target).begin() as writing:
        for table in Base.metadata.sorted_tables:
            if table.name not in leave_out:
                condition = where(table) if where else None
                added[table.name] = sum(merge_chunk(writing, table, rows) for rows in chunks(reading, table, condition))
    return added


def chunks(connection: sa.Connection, table: sa.Table, condition: Any = None) -> Iterator[list[Row]]:
    """The rows of `table`, in the order of their keys."""
    query = sa.select(table).order_by(*table.primary_key.columns)
    if condition is not None:
        query = query.where(condition)
    for part in connection.execution_options(yield_per=CHUNK).execute(query).mappings().partitions():
        yield [dict(row) for row in part]


def merge_chunk(connection: sa.Connection, table: sa.Table, rows: Sequence[Row]) -> int:
    """Insert what is new of `rows`; how many that were."""
    first = next(iter(table.primary_key.columns))
    wanted = sorted({row[first.name] for row in rows})
    there = {key_of(table, row): dict(row) for row in find(connection, table, first, wanted)}
    new = []
    for row in rows:
        known = there.get(key_of(table, row))
        if known is None:
            new.append(row)
        else:
            reconcile(connection, table, row, known)
    if new:
        insert_new(connection, table, new)
    return len(new)


def find(connection: sa.Connection, table: sa.Table, column: sa.Column[Any], values: Sequence[Any]) -> Iterator[Any]:
    for start in range(0, len(values), CHUNK):
        yield from connection.execute(sa.select(table).where(column.in_(values[start : start + CHUNK]))).mappings()


def key_of(table: sa.Table, row: Any) -> tuple[Any, ...]:
    return tuple(row[column.name] for column in table.primary_key.columns)


def reconcile(connection: sa.Connection, table: sa.Table, row: Row, known: Row) -> None:
    """InputError unless `row` is the known one; a known row that still runs takes on how it ended."""
    mutable = table.info.get(MUTABLE, ())
    for name, value in row.items():
        if name not in mutable and value != known[name]:
            raise conflict(table, row, f"{name} {known[name]!r}, as in the database merged into")
    if mutable and known != row and known.get("state") == "running":
        same = [column == row[column.name] for column in table.primary_key.columns]
        connection.execute(sa.update(table).where(*same).values({name: row[name] for name in mutable}))


def insert_new(connection: sa.Connection, table: sa.Table, rows: Sequence[Row]) -> None:
    try:
        with connection.begin_nested():
            connection.execute(sa.insert(table), rows)
    except IntegrityError:
        for row in rows:  # which one it is, one by one
            try:
                with connection.begin_nested():
                    connection.execute(sa.insert(table), [row])
            except IntegrityError as error:
                cause = " ".join(str(error.orig).split())
                raise conflict(table, row, f"a row that no other contradicts ({cause})") from error
        raise


def conflict(table: sa.Table, row: Row, expected: str) -> InputError:
    name = "/".join(str(part) for part in key_of(table, row))
    return InputError(f"{table.name}.{name}", {k: v for k, v in row.items() if not isinstance(v, bytes)}, expected)
