"""Opening a results database: a file path or a URL in, an engine at the newest schema out.

An empty database is built and an older one upgraded, in one transaction under a lock, by the
migrations that ship beside this file. Whatever else is found there (a foreign database, a newer
schema, a folder, a file that is no database) is refused before anything is written.
"""

import sqlite3
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError

from suite.errors import InputError
from suite.records import canonical_json

DEFAULT_DB = "kvproof.db"
BUSY_TIMEOUT_S = 30
MMAP_BYTES = 2**31 - 2**16  # the most that SQLite takes
SQLITE_MAGIC = b"SQLite format 3\x00"
MIGRATIONS = Path(__file__).parent / "migrations"
UPGRADE_LOCK = 0x6B76_7072  # any number of our own: one PostgreSQL session upgrades at a time
DRIVERS = {"sqlite": "sqlite+pysqlite", "postgresql": "postgresql+psycopg"}
SQLITE_TROUBLE = frozenset({
    sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOTADB,
})  # fmt: skip
EXPECTED = "a file path, or a URL sqlite:///FILE or postgresql://..."


def open_db(db: str | Path = DEFAULT_DB, *, create: bool = True) -> sa.Engine:
    """An engine on `db`, upgraded to the newest schema.

    With `create=False` (readers) an absent or empty database is an error too. Raises InputError with
    field "db" for everything that is no usable kvproof database.
    """
    url = parse_url(db)
    if url.get_backend_name() == "sqlite":
        check_file(url, create)
    engine = make_engine(url)
    try:
        if current_revision(engine) != newest_revision():
            upgrade(engine, create)
    except BaseException as error:
        engine.dispose()
        if not isinstance(error, DBAPIError):
            raise
        cause = " ".join(str(error.orig).split())
        raise InputError("db", shown(url), f"a readable and writable database ({cause})") from error
    return engine


def database_exists(db: str | Path) -> bool:
    """Whether there is something at `db` to read: a SQLite file, or any server. InputError where it can be neither."""
    url = parse_url(db)
    return url.get_backend_name() != "sqlite" or Path(str(url.database)).exists()


def folder_of(engine: sa.Engine) -> Path | None:
    """The folder that a SQLite database lies in; None for a server's."""
    if engine.dialect.name != "sqlite":
        return None
    return Path(str(engine.url.database)).resolve().parent


def trouble(error: BaseException) -> str | None:
    """What went wrong with the database itself (damaged, full, locked, gone); None for every error that is ours."""
    if not isinstance(error, DBAPIError):
        return None
    code = getattr(error.orig, "sqlite_errorcode", None)
    # the low byte is the code, the rest its variety; SQLite's OperationalError is also a wrong statement's
    known = isinstance(error, OperationalError) if code is None else code & 0xFF in SQLITE_TROUBLE
    return " ".join(str(error.orig).split()) if known else None


def parse_url(db: str | Path) -> sa.URL:
    """The URL of `db`, a bare path being a SQLite file."""
    text = str(db)
    if "://" not in text:
        if not text:
            raise InputError("db", text, EXPECTED)
        return on_disk(sa.URL.create(DRIVERS["sqlite"], database=text), text)
    try:
        url = sa.make_url(text)
    except (ArgumentError, ValueError) as error:
        raise InputError("db", text, EXPECTED) from error
    if url.get_backend_name() not in DRIVERS:
        raise InputError("db", shown(url), EXPECTED)
    if url.get_backend_name() == "sqlite":
        on_disk(url, text)
    return url.set(drivername=DRIVERS[url.drivername]) if url.drivername in DRIVERS else url


def on_disk(url: sa.URL, text: str) -> sa.URL:
    """The SQLite `url`, written as `text`, when it names a file and nothing else."""
    if url.database in (None, "", ":memory:"):
        raise InputError("db", text, "a file: what is in memory is gone with the command that wrote it")
    if url.query:
        raise InputError("db", text, f"sqlite:///{url.database}, without parameters")
    return url


def shown(url: sa.URL) -> str:
    """`url` as a message may show it: a file's path, or a URL without its password."""
    if url.get_backend_name() == "sqlite" and url.database:
        return url.database
    return url.render_as_string(hide_password=True)


def check_file(url: sa.URL, create: bool) -> None:
    """InputError when the SQLite file of `url` cannot be one; touches nothing."""
    path = Path(str(url.database))
    try:
        if path.is_dir():
            raise InputError("db", str(path), "a file, this is a folder")
        if not path.exists():
            if not create:
                raise InputError("db", str(path), "an existing database; `kvproof run` makes one")
            if not path.parent.is_dir():
                raise InputError("db", str(path), f"a file in an existing folder, {path.parent} is none")
            return
        with path.open("rb") as file:
            head = file.read(len(SQLITE_MAGIC))
    except OSError as error:
        raise InputError("db", str(path), f"a readable and writable database ({error.strerror})") from error
    if head not in (b"", SQLITE_MAGIC):
        raise InputError("db", str(path), "a SQLite database, this file is something else")


def make_engine(url: sa.URL) -> sa.Engine:
    """An engine whose SQLite connections enforce foreign keys, log ahead and wait for each other."""
    try:
        engine = sa.create_engine(
            url, json_serializer=lambda value: canonical_json(value).decode(), hide_parameters=True, pool_pre_ping=True
        )
    except (NoSuchModuleError, ModuleNotFoundError) as error:
        raise InputError("db", shown(url), f"a URL whose driver is installed ({error})") from error
    if engine.dialect.name == "sqlite":
        sa.event.listen(engine, "connect", set_up_sqlite)
        sa.event.listen(engine, "begin", begin_sqlite)
    return engine


def set_up_sqlite(connection: Any, record: Any) -> None:
    # sqlite3 would otherwise begin late and never around DDL: a failed migration would stay half done
    connection.isolation_level = None
    cursor: sqlite3.Cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_S * 1000}")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute(f"PRAGMA mmap_size = {MMAP_BYTES}")  # a year's history is read in thousands of small jumps
    cursor.close()


def begin_sqlite(connection: sa.Connection) -> None:
    # a writer takes its lock at once: one that reads first cannot wait for it later
    write = connection.get_execution_options().get("kvproof_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def writer(engine: sa.Engine) -> sa.Engine:
    """`engine`, for transactions that write."""
    return engine.execution_options(kvproof_write=True)


def alembic_config(connection: sa.Connection | None = None) -> Config:
    """Alembic's configuration, from the package; there is no ini file."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def newest_revision() -> str:
    """The newest schema revision that this kvproof knows."""
    head = ScriptDirectory.from_config(alembic_config()).get_current_head()
    if head is None:
        raise RuntimeError(f"no migrations in {MIGRATIONS}: kvproof is not installed completely")
    return head


def current_revision(engine: sa.Engine) -> str | None:
    """The revision that the database says it has; None when it says nothing."""
    with engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def upgrade(engine: sa.Engine, create: bool) -> None:
    """Bring the database to the newest revision, whole or not at all."""
    script = ScriptDirectory.from_config(alembic_config())
    with writer(engine).begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(UPGRADE_LOCK)))
        revision = MigrationContext.configure(connection).get_current_revision()
        name = shown(engine.url)
        if revision is None:
            if tables := sa.inspect(connection).get_table_names():
                raise InputError(
                    "db", name, f"a kvproof database or an empty one, this has {', '.join(sorted(tables)[:3])}"
                )
            if not create:
                raise InputError("db", name, "a kvproof database, this one is empty")
        elif revision not in {known.revision for known in script.walk_revisions()}:
            found = f"{name} at schema revision {revision}"
            raise InputError("db", found, f"a revision up to {newest_revision()}, the newest that this kvproof knows")
        command.upgrade(alembic_config(connection), "head")
