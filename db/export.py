"""Results for other tools: a folder of Parquet files with their manifest, or a SQLite file without raw samples."""

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from db.base import Base, UtcTime
from db.merge import chunks, merge
from db.session import newest_revision, open_db
from suite.errors import InputError
from suite.records import canonical_json

LEFT_OUT = ("sample_block", "ingest_log")  # of a trimmed file: raw samples are most of the bytes
MANIFEST = "manifest.json"


def export_sqlite(source: sa.Engine, path: Path, run_id: str | None = None) -> dict[str, int]:
    """Write `source`, or one run of it, to a new SQLite file without raw samples; the rows of each table."""
    refuse_existing(path)
    target = open_db(path)
    try:
        added = merge(source, target, LEFT_OUT, lambda table: of_run(table, run_id))
        plain = target.raw_connection()  # neither statement runs inside a transaction
        plain.cursor().execute("PRAGMA journal_mode = DELETE")  # one file, that opens from read-only media
        plain.cursor().execute("VACUUM")
        plain.close()
    finally:
        target.dispose()
    return dict(added)


def export_parquet(source: sa.Engine, folder: Path, run_id: str | None = None) -> dict[str, int]:
    """Write every table of `source`, or of one run of it, to a new folder: TABLE.parquet and a manifest."""
    import pyarrow.parquet as parquet

    refuse_existing(folder)
    folder.mkdir()
    rows: dict[str, int] = {}
    with source.connect() as connection:
        for table in Base.metadata.sorted_tables:
            schema = arrow_schema(table)
            with parquet.ParquetWriter(folder / f"{table.name}.parquet", schema, compression="zstd") as file:
                rows[table.name] = 0
                for part in chunks(connection, table, of_run(table, run_id)):
                    file.write_table(arrow_table(table, part, schema))
                    rows[table.name] += len(part)
    write_manifest(folder, rows, run_id)
    return rows


def write_manifest(folder: Path, rows: dict[str, int], run_id: str | None) -> None:
    files = {
        f"{name}.parquet": {
            "rows": n,
            "sha256": hashlib.sha256((folder / f"{name}.parquet").read_bytes()).hexdigest(),
        }
        for name, n in rows.items()
    }
    manifest = {"schema_revision": newest_revision(), "run": run_id, "files": files}
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")


def refuse_existing(path: Path) -> None:
    if path.exists():
        raise InputError("export", str(path), "a path where nothing is yet")
    if not path.parent.is_dir():
        raise InputError("export", str(path), f"a path in an existing folder, {path.parent} is none")


def of_run(table: sa.Table, run_id: str | None) -> Any:
    """The condition that a row of `table` hangs on the run; None where every row is wanted, or the table is shared."""
    if run_id is None:
        return None
    if table.name == "run":
        return table.c.id == run_id
    if "run_id" in table.c:
        return table.c.run_id == run_id
    for key in table.foreign_keys:
        parent = key.column.table
        if parent is not table and (condition := of_run(parent, run_id)) is not None:
            return key.parent.in_(sa.select(key.column).where(condition))
    return None


def arrow_schema(table: sa.Table) -> Any:
    import pyarrow

    return pyarrow.schema([(column.name, arrow_type(column.type)) for column in table.columns])


def arrow_type(kind: sa.types.TypeEngine[Any]) -> Any:
    """Arrow's type for a column's; JSON is text."""
    import pyarrow

    for known, arrow in (
        (UtcTime, pyarrow.timestamp("us", tz="UTC")),
        (sa.JSON, pyarrow.string()),
        (sa.Boolean, pyarrow.bool_()),
        (sa.Integer, pyarrow.int64()),
        (sa.Float, pyarrow.float64()),
        (sa.LargeBinary, pyarrow.binary()),
        (sa.String, pyarrow.string()),
    ):
        if isinstance(kind, known):
            return arrow
    raise TypeError(f"a column of type {kind!r} has no type in Parquet")


def arrow_table(table: sa.Table, rows: list[dict[str, Any]], schema: Any) -> Any:
    import pyarrow

    texts = [column.name for column in table.columns if isinstance(column.type, sa.JSON)]
    for row in rows:
        for name in texts:
            row[name] = None if row[name] is None else canonical_json(row[name]).decode()
    return pyarrow.Table.from_pylist(rows, schema=schema)
