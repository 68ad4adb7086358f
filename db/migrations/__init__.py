"""Alembic's migrations, run from the package by `db.session.open_db`."""
