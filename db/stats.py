"""How many rows each table has, and how many bytes it takes with its indices."""

from typing import TypedDict

import sqlalchemy as sa

from db.base import Base


class TableStats(TypedDict):
    """One table. `bytes` is None where the database cannot tell."""

    table: str
    rows: int
    bytes: int | None


def table_stats(engine: sa.Engine) -> list[TableStats]:
    with engine.connect() as connection:
        sizes = sqlite_bytes(connection) if engine.dialect.name == "sqlite" else postgresql_bytes(connection)
        return [
            TableStats(
                table=str(table.name),
                rows=int(connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0),
                bytes=sizes.get(table.name),
            )
            for table in Base.metadata.sorted_tables
        ]


def sqlite_bytes(connection: sa.Connection) -> dict[str, int]:
    """Pages of each table and its indices; empty where SQLite was built without its dbstat table."""
    if not connection.exec_driver_sql("SELECT sqlite_compileoption_used('ENABLE_DBSTAT_VTAB')").scalar():
        return {}
    query = """SELECT m.tbl_name, SUM(s.pgsize) FROM dbstat AS s JOIN sqlite_master AS m ON m.name = s.name
               GROUP BY m.tbl_name"""
    return {row[0]: row[1] for row in connection.exec_driver_sql(query)}


def postgresql_bytes(connection: sa.Connection) -> dict[str, int]:
    query = "SELECT relname, pg_total_relation_size(oid) FROM pg_class WHERE relkind = 'r'"
    return {row[0]: row[1] for row in connection.exec_driver_sql(query)}
