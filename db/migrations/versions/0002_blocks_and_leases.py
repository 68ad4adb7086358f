"""Blocks that are repeated, guarded and labelled; runs that are leased, and so can be resumed.

In SQLite the many small rows that hang on a cell_run move into their primary key's own tree: their long
keys are then there once and not twice, and the rows of one cell_run lie together.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

COLUMNS: dict[str, dict[str, sa.types.TypeEngine[Any]]] = {
    "arm": {"label": sa.String()},
    "run": {
        "seed": sa.Integer(),
        "shard": sa.String(),
        "environment": sa.JSON(),
        "environment_hash": sa.String(),
        "lease_owner": sa.String(),
        "heartbeat_at": sa.String(length=32),
        "spool": sa.String(),
    },
    "cell_run": {"gpu_uuid": sa.String(), "guards": sa.JSON(), "void_reason": sa.String()},
}


CLUSTERED = ("measurement", "item_result")


def rebuild(table: str, suffix: str) -> None:
    """Rebuild a SQLite table that nothing refers to, with `suffix` after its definition."""
    connection = op.get_bind()
    sql = str(connection.scalar(sa.text("SELECT sql FROM sqlite_master WHERE name = :name"), {"name": table}))
    definition = sql.removesuffix("WITHOUT ROWID").replace(table, f"{table}_new", 1)
    op.execute(f"{definition}{suffix}")
    op.execute(f"INSERT INTO {table}_new SELECT * FROM {table}")
    op.execute(f"DROP TABLE {table}")
    op.execute(f"ALTER TABLE {table}_new RENAME TO {table}")


def upgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        for table in CLUSTERED:
            rebuild(table, " WITHOUT ROWID")
    for table, columns in COLUMNS.items():
        for name, kind in columns.items():
            op.add_column(table, sa.Column(name, kind, nullable=True))


def downgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        for table in CLUSTERED:
            rebuild(table, "")
    for table, columns in COLUMNS.items():
        for name in reversed(list(columns)):
            op.execute(f"ALTER TABLE {table} DROP COLUMN {name}")  # a batch would rebuild a table that others refer to
