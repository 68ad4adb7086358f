"""The schema: two databases, one history; whatever is no kvproof database is refused untouched."""

import datetime
import math
import sqlite3
import threading
import uuid

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from db import models, session
from db.keys import utc_now, uuid7
from db.session import alembic_config, current_revision, newest_revision, open_db, writer
from suite.errors import InputError
from tests.db_support import empty_postgres, postgres

TABLES = {
    *("environment", "code_rev", "run", "cell", "arm", "block", "cell_run", "metric", "measurement"),
    *("sample_block", "item", "item_result", "comparison", "ingest_log"),
    *("gate_policy", "gate_decision", "gate_evidence", "noise_model", "baseline", "change_point"),
    "fault_trial",
}


@pytest.fixture(scope="module")
def server():
    with postgres() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    """The URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'results.db'}"
    server = request.getfixturevalue("server")
    empty_postgres(server)
    return server


@pytest.fixture
def engine(url):
    engine = open_db(url)
    yield engine
    engine.dispose()


def tables(engine):
    return set(sa.inspect(engine).get_table_names())


def test_both_databases_go_up_compare_down_and_up_again(engine):
    assert tables(engine) == TABLES | {"alembic_version"}
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, models.Base.metadata) == []
    with writer(engine).begin() as connection:
        command.downgrade(alembic_config(connection), "base")
    assert tables(engine) == {"alembic_version"}
    with writer(engine).begin() as connection:
        command.upgrade(alembic_config(connection), "head")
    assert tables(engine) == TABLES | {"alembic_version"}
    assert current_revision(engine) == newest_revision()


def test_a_missing_column_would_be_seen(engine):
    with writer(engine).begin() as connection:
        connection.execute(sa.text("ALTER TABLE cell_run DROP COLUMN stderr_tail"))
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), models.Base.metadata) != []


def test_opening_again_changes_nothing(engine, url):
    again = open_db(url, create=False)
    assert tables(again) == TABLES | {"alembic_version"}
    again.dispose()


def test_many_open_an_empty_database_at_once(url):
    errors = []

    def open_one():
        try:
            open_db(url).dispose()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=open_one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_newer_database_is_refused_untouched(engine, url):
    with writer(engine).begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9f_from_the_future'"))
    with pytest.raises(InputError) as caught:
        open_db(url)
    assert caught.value.field == "db"
    assert "9f_from_the_future" in str(caught.value)
    assert newest_revision() in str(caught.value)
    assert current_revision(engine) == "9f_from_the_future"


def test_a_foreign_database_is_refused_untouched(url):
    engine = session.make_engine(session.parse_url(url))
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE invoices (id INTEGER)"))
    with pytest.raises(InputError, match="invoices"):
        open_db(url)
    assert tables(engine) == {"invoices"}
    engine.dispose()


def test_a_reader_makes_no_database(url, tmp_path):
    with pytest.raises(InputError, match="db: "):
        open_db(url, create=False)
    assert not (tmp_path / "results.db").exists()


def test_a_failed_upgrade_leaves_nothing(url, monkeypatch):
    upgrade = command.upgrade

    def fail(config, revision):
        upgrade(config, revision)
        raise RuntimeError("in the middle")

    monkeypatch.setattr(command, "upgrade", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        open_db(url)
    engine = session.make_engine(session.parse_url(url))
    assert tables(engine) == set()
    engine.dispose()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", "a file path"),
        (".", "this is a folder"),
        ("absent/results.db", "existing folder"),
        ("notes.txt", "something else"),
        ("notes.txt/results.db", "existing folder"),
        ("broken.db", "readable and writable database"),
        ("/proc/results.db", "readable and writable database"),
        ("mysql://host/results", "postgresql://"),
        ("nonsense://x", "postgresql://"),
        ("postgresql://someone:secret@localhost:1/x", "readable and writable database"),
    ],
)
def test_what_is_no_database_is_one_error(tmp_path, monkeypatch, name, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("these are notes, and no database")
    (tmp_path / "broken.db").write_bytes(session.SQLITE_MAGIC + b"\xff" * 5000)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InputError) as caught:
        open_db(name)
    assert caught.value.field == "db"
    assert expected in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_sqlite_logs_ahead_enforces_keys_and_waits(tmp_path):
    engine = open_db(tmp_path / "results.db")
    with engine.connect() as connection:
        assert connection.scalar(sa.text("PRAGMA journal_mode")) == "wal"
        assert connection.scalar(sa.text("PRAGMA foreign_keys")) == 1
        assert connection.scalar(sa.text("PRAGMA busy_timeout")) == 1000 * session.BUSY_TIMEOUT_S
    engine.dispose()


def test_a_reader_does_not_block_the_writer(tmp_path):
    engine = open_db(tmp_path / "results.db")
    with engine.connect() as reader, writer(engine).begin() as connection:
        reader.execute(sa.select(models.Metric)).all()
        insert(connection, models.Metric, name="itl_ms", unit="ms", better="lower", timing=True)
    engine.dispose()


def insert(connection, table, /, **row):
    connection.execute(sa.insert(table).values(**row))


def chain(connection):
    """The rows that a cell_run hangs on."""
    insert(connection, models.CodeRev, id="rev", repo="r", sha="s", patch_sha="", dirty=False)
    times = {"started_at": utc_now(), "state": "running", "planned": 1, "plan": {}, "plan_sha": "p"}
    insert(connection, models.Run, id="run", suite="s", code_rev_id="rev", **times)
    names = {
        "family": "engine",
        "model": "m",
        "backend": "b",
        "launcher": "native",
        "device": "cpu",
        "dtype": "float32",
    }
    insert(connection, models.Cell, id="cell", page_size=1, graph=True, workload="w", params={}, **names)
    insert(connection, models.Arm, id="arm", pool="static", plants=[])
    insert(connection, models.Block, id="block", run_id="run", cell_id="cell", number=0, arm_order=["arm"], seed=1)
    insert(connection, models.Metric, name="itl_ms", unit="ms", better="lower", timing=True)


CELL_RUN = {
    **{"id": "row", "run_id": "run", "cell_id": "cell", "arm_id": "arm", "block_id": "block", "attempt": 1},
    **{"status": "refused", "reason": "why", "effective": {}, "duration_s": 0.0},
}


@pytest.mark.parametrize(
    "change",
    [
        {"status": "fine"},
        {"reason": None},
        {"status": "passed"},
        {"attempt": 0},
        {"duration_s": -1.0},
        {"run_id": "absent"},
        {"id": "row2"},
    ],
    ids=["status", "no reason", "passed without launcher", "attempt", "duration", "no such run", "same attempt"],
)
def test_the_database_itself_refuses_impossible_rows(engine, change):
    with writer(engine).begin() as connection:
        chain(connection)
        insert(connection, models.CellRun, **CELL_RUN, started_at=utc_now())
    second = {**CELL_RUN, "id": "other", "attempt": 2, **change}
    if change == {"id": "row2"}:  # the same attempt twice
        second["attempt"] = 1
    with pytest.raises(sa.exc.IntegrityError), writer(engine).begin() as connection:
        insert(connection, models.CellRun, **second, started_at=utc_now())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_the_database_itself_refuses_what_is_no_number(engine, value):
    with writer(engine).begin() as connection:
        chain(connection)
        insert(connection, models.CellRun, **CELL_RUN, started_at=utc_now())
    with pytest.raises(sa.exc.IntegrityError), writer(engine).begin() as connection:
        insert(connection, models.Measurement, cell_run_id="row", metric="itl_ms", stat="value", value=value, n=1)


def test_times_are_aware_utc_text(engine):
    east = datetime.datetime(2026, 12, 1, 1, 30, tzinfo=datetime.timezone(datetime.timedelta(hours=5)))
    with writer(engine).begin() as connection:
        chain(connection)
        insert(connection, models.CellRun, **CELL_RUN, started_at=east)
        assert connection.scalar(sa.text("SELECT started_at FROM cell_run")) == "2026-11-30T20:30:00.000000+00:00"
        assert connection.scalar(sa.select(models.CellRun.started_at)) == east
    with pytest.raises(sa.exc.StatementError, match="naive"), writer(engine).begin() as connection:
        insert(connection, models.CellRun, **{**CELL_RUN, "attempt": 2}, started_at=datetime.datetime(2026, 12, 1))


def test_uuid7_is_one_and_sorts_by_time():
    keys = [uuid7() for _ in range(2000)]
    assert len(set(keys)) == len(keys)
    assert {uuid.UUID(key).version for key in keys} == {7}
    assert {uuid.UUID(key).variant for key in keys} == {uuid.RFC_4122}
    prefixes = [key[:18] for key in keys]
    assert prefixes == sorted(prefixes)
    ms = uuid.UUID(keys[-1]).int >> 80
    assert abs(ms / 1000 - utc_now().timestamp()) < 5


def test_a_plain_sqlite_reads_the_file(tmp_path):
    open_db(tmp_path / "results.db").dispose()
    plain = sqlite3.connect(tmp_path / "results.db")
    assert plain.execute("SELECT version_num FROM alembic_version").fetchall() == [(newest_revision(),)]
    plain.close()
