"""What Alembic runs to migrate: always on the connection, and inside the transaction, of the caller."""

from alembic import context

from db.models import Base

connection = context.config.attributes["connection"]
if connection is None:
    raise RuntimeError("kvproof's migrations run through db.session.open_db, which hands them its connection")
context.configure(
    connection=connection, target_metadata=Base.metadata, render_as_batch=True, compare_server_default=True
)
context.run_migrations()
