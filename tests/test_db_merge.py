"""Many machines, one history: merging, exporting, counting and checking, on both databases."""

import json
import multiprocessing
import shutil
import subprocess
import sys

import pytest
import sqlalchemy as sa
from alembic import command

from db import models, session
from db.export import export_parquet, export_sqlite
from db.invariants import CHECKS, broken_rows
from db.keys import utc_now
from db.merge import merge
from db.queries import show_rows
from db.session import alembic_config, open_db, writer
from db.stats import table_stats
from db.store import Entry, Store
from db.synthetic import fill, timings
from suite import cli
from suite.errors import InputError, InvariantError
from suite.records import Outcome
from tests.db_support import empty_postgres, postgres
from tests.matrix_fakes import make_job, make_outcome
from tests.test_db_queries import REVISION
from tests.test_db_store import contents

JOBS = [make_job("static"), make_job("unified")]


@pytest.fixture(scope="module")
def server():
    with postgres() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def target(request, tmp_path):
    if request.param == "sqlite":
        engine = open_db(tmp_path / "target.db")
    else:
        server = request.getfixturevalue("server")
        empty_postgres(server)
        engine = open_db(server)
    yield engine
    engine.dispose()


def machine(folder, name, state="finished"):
    """A database with one run of two passed rows."""
    engine = open_db(folder / f"{name}.db")
    store = Store(engine)
    run_id = store.begin_run("tiny", {"name": name}, JOBS, REVISION, seed=1)
    if state != "running":
        write(store, run_id)
        store.end_run(run_id, state)
    return engine, run_id


def write(store, run_id):
    entries = [Entry(job=job, outcome=make_outcome(), started_at=utc_now()) for job in JOBS]
    return store.ingest_all(run_id, entries)


def all_rows(engine):
    return {name: sorted(map(repr, rows)) for name, rows in contents(Store(engine)).items()}


def test_two_machines_become_one_history_and_merging_again_changes_nothing(target, tmp_path):
    for name in ("one", "two"):
        engine, run_id = machine(tmp_path, name)
        added = merge(engine, target)
        assert (added["run"], added["cell_run"], added["measurement"]) == (1, 2, 8)
        before = all_rows(target)
        assert sum(merge(engine, target).values()) == 0
        assert all_rows(target) == before
        assert show_rows(target, run_id) == show_rows(engine, run_id)
        engine.dispose()
    assert len(before["run"]) == 2
    assert len(before["cell"]) == 1
    assert broken_rows(target) == []


CONFLICTS = {
    "a value": ("UPDATE measurement SET value = 0.5 WHERE metric = 'accuracy'", "measurement", "value 0.98"),
    "a status": ("UPDATE cell_run SET status = 'wrong', reason = 'x'", "cell_run", "'passed'"),
    "a dimension": ("UPDATE cell SET page_size = 7", "cell", "page_size 16"),
    "a sample": ("UPDATE sample_block SET n = 3 WHERE metric = 'itl_ms'", "sample_block", "n 12"),
}


@pytest.mark.parametrize(("statement", "table", "said"), CONFLICTS.values(), ids=CONFLICTS)
def test_a_contradiction_is_named_and_nothing_is_merged(target, tmp_path, statement, table, said):
    engine, _ = machine(tmp_path, "one")
    merge(engine, target)
    Store(engine).begin_run("tiny", {"name": "new"}, JOBS, REVISION)
    with writer(engine).begin() as connection:
        connection.exec_driver_sql(statement)
    before = all_rows(target)
    with pytest.raises(InputError) as caught:
        merge(engine, target)
    assert caught.value.field.startswith(f"{table}.")
    assert said in str(caught.value)
    assert all_rows(target) == before
    engine.dispose()


def test_two_rows_of_one_attempt_are_a_conflict(target, tmp_path):
    """The same run was resumed from two copies of one file."""
    engine, run_id = machine(tmp_path, "one", state="running")
    engine.dispose()
    shutil.copy(tmp_path / "one.db", tmp_path / "copy.db")
    copies = [open_db(tmp_path / name) for name in ("one.db", "copy.db")]
    for copy in copies:
        write(Store(copy), run_id)
    merge(copies[0], target)
    before = all_rows(target)
    with pytest.raises(InputError, match=r"cell_run\..*a row that no other contradicts"):
        merge(copies[1], target)
    assert all_rows(target) == before
    for copy in copies:
        copy.dispose()


def test_a_run_merged_while_it_ran_takes_on_its_end(target, tmp_path):
    engine, run_id = machine(tmp_path, "one", state="running")
    merge(engine, target)
    write(Store(engine), run_id)
    Store(engine).end_run(run_id, "finished")
    merge(engine, target)
    with target.connect() as connection:
        assert connection.scalar(sa.select(models.Run.state)) == "finished"
    assert broken_rows(target) == []
    engine.dispose()


def test_a_trimmed_file_holds_one_run_without_raw_samples(target, tmp_path):
    runs = []
    for name in ("one", "two"):
        engine, run_id = machine(tmp_path, name)
        merge(engine, target)
        runs.append(run_id)
        engine.dispose()
    rows = export_sqlite(target, tmp_path / "trimmed.db", runs[0])
    assert (rows["run"], rows["cell_run"], rows["measurement"]) == (1, 2, 8)
    trimmed = open_db(tmp_path / "trimmed.db", create=False)
    assert show_rows(trimmed, runs[0]) == show_rows(target, runs[0])
    with trimmed.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(models.SampleBlock)) == 0
    trimmed.dispose()
    with pytest.raises(InputError, match=r"export: got .*, expected a path where nothing is yet"):
        export_sqlite(target, tmp_path / "trimmed.db")


def test_parquet_holds_every_table_as_it_is(target, tmp_path):
    import pyarrow.parquet as parquet

    engine, _ = machine(tmp_path, "one")
    merge(engine, target)
    rows = export_parquet(target, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert {name.removesuffix(".parquet"): file["rows"] for name, file in manifest["files"].items()} == rows
    cell_runs = parquet.read_table(tmp_path / "out" / "cell_run.parquet").to_pylist()
    with target.connect() as connection:
        known = {row.id: row for row in connection.execute(sa.select(*models.CellRun.__table__.columns))}
    assert {row["id"] for row in cell_runs} == set(known)
    assert all(row["started_at"] == known[row["id"]].started_at for row in cell_runs)
    assert all(json.loads(row["effective"]) == {"page_size": 16} for row in cell_runs)
    assert parquet.read_table(tmp_path / "out" / "measurement.parquet").num_rows == 8
    engine.dispose()


def test_stats_count_rows_and_bytes(target, tmp_path):
    engine, _ = machine(tmp_path, "one")
    merge(engine, target)
    stats = {row["table"]: row for row in table_stats(target)}
    assert stats["cell_run"]["rows"] == 2
    assert stats["measurement"]["rows"] == 8
    assert all(row["bytes"] is None or row["bytes"] > 0 for row in stats.values())
    engine.dispose()


BREAKS = {
    "keys": ("UPDATE cell SET params = '{}'", "keys are the hashes of contents"),
    "arm": ("UPDATE arm SET label = 'replicate' WHERE pool = 'static'", "keys are the hashes of contents"),
    "plan": ("UPDATE run SET plan = '{}'", "keys are the hashes of contents"),
    "bytes": ("UPDATE sample_block SET sha256 = 'x'", "samples are what was packed"),
    "n": ("UPDATE sample_block SET n = 1", "samples are what was packed"),
    "time": ("UPDATE cell_run SET status = 'wrong', reason = 'x'", "only passed rows have times"),
    "arms": ("UPDATE block SET arm_order = '[]'", "rows are of their block"),
    "attempt": ("UPDATE cell_run SET attempt = 2", "attempts are whole"),
    "half": ("UPDATE cell_run SET void_reason = 'x' WHERE id = (SELECT MAX(id) FROM cell_run)", "attempts are whole"),
    "planned": ("UPDATE run SET planned = 3", "ended runs have every row"),
    "ended": ("UPDATE run SET finished_at = NULL", "ended runs have every row"),
    "log": ("DELETE FROM ingest_log", "every row has its payload noted"),
}


@pytest.mark.parametrize(("statement", "invariant"), BREAKS.values(), ids=BREAKS)
def test_check_names_every_broken_row(target, tmp_path, statement, invariant):
    engine, _ = machine(tmp_path, "one")
    merge(engine, target)
    assert broken_rows(target) == []
    with writer(target).begin() as connection:
        connection.exec_driver_sql(statement)
    assert invariant in CHECKS
    assert invariant in {row["invariant"] for row in broken_rows(target)}
    engine.dispose()


def test_a_dangling_reference_is_found(tmp_path):
    engine, _ = machine(tmp_path, "one")
    with engine.connect() as connection:
        connection.exec_driver_sql("COMMIT")
        connection.exec_driver_sql("PRAGMA foreign_keys = OFF")
        connection.exec_driver_sql("DELETE FROM item")
        connection.exec_driver_sql("PRAGMA foreign_keys = ON")
        connection.exec_driver_sql("BEGIN")
    assert "the database is sound" in {row["invariant"] for row in broken_rows(engine)}
    engine.dispose()


def test_rows_of_the_first_schema_survive_the_upgrade_and_the_way_back(tmp_path):
    engine, run_id = machine(tmp_path, "one")
    before = show_rows(engine, run_id)
    for revision in ("0001", "head"):
        with writer(engine).begin() as connection:
            move = command.downgrade if revision == "0001" else command.upgrade
            move(alembic_config(connection), revision)
    assert show_rows(engine, run_id) == before
    engine.dispose()


def test_a_batch_is_whole_or_not_at_all(target):
    store = Store(target)
    run_id = store.begin_run("tiny", {}, JOBS, REVISION)
    good = Entry(job=JOBS[0], outcome=make_outcome(), started_at=utc_now())
    before = all_rows(target)
    for bad, error in (
        (Entry(job=JOBS[1], outcome=Outcome(status="crashed"), started_at=utc_now()), InputError),
        (Entry(job=make_job(block=7), outcome=make_outcome(), started_at=utc_now()), InvariantError),
        (Entry(job=JOBS[0], outcome=make_outcome(seed=1), started_at=utc_now()), InvariantError),
    ):
        with pytest.raises(error):
            store.ingest_all(run_id, [good, bad])
        assert all_rows(target) == before


def one_writer(url, number, rows):
    engine = open_db(url)
    store = Store(engine)
    jobs = [make_job("static", page_size=number * 1000 + row + 1) for row in range(rows)]
    run_id = store.begin_run("writers", {"writer": number}, jobs, REVISION)
    for start in range(0, rows, 20):
        batch = [Entry(job=j, outcome=make_outcome(), started_at=utc_now()) for j in jobs[start : start + 20]]
        store.ingest_all(run_id, batch)
    store.end_run(run_id, "finished")
    engine.dispose()


@pytest.mark.parametrize("writers", [4])
def test_many_writers_lose_no_row(target, writers):
    url = target.url.render_as_string(hide_password=False)
    context = multiprocessing.get_context("fork")
    target.dispose()
    processes = [context.Process(target=one_writer, args=(url, number, 60)) for number in range(writers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * writers
    with target.connect() as connection:
        count = connection.scalar(sa.select(sa.func.count()).select_from(models.CellRun))
    assert count == writers * 60
    assert broken_rows(target) == []


def test_a_synthetic_year_is_sound_and_answers(target):
    list(fill(target, range(3), 20))
    assert list(timings(target, 3, 20)) == ["trend_ms", "night_pairs_ms", "merge_one_night_ms"]
    assert broken_rows(target) == []
    with target.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(models.CellRun)) == 4 * 20 * 2


# -- the commands --------------------------------------------------------------------------------


@pytest.fixture
def kvproof(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(["db", *arguments])
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    return run


def test_the_commands_merge_check_count_and_export(kvproof, tmp_path):
    for name in ("one", "two"):
        machine(tmp_path, name)[0].dispose()
    code, out, _ = kvproof("merge", "one.db", "two.db", "--db", "all.db", "--json")
    assert (code, [row["rows"]["cell_run"] for row in json.loads(out)]) == (0, [2, 2])
    code, out, _ = kvproof("merge", "one.db", "--db", "all.db", "--json")
    assert (code, json.loads(out)) == (0, [{"source": "one.db", "rows": {}}])
    assert kvproof("check", "--db", "all.db", "--json")[:2] == (0, "[]\n")
    code, out, _ = kvproof("stats", "--db", "all.db", "--json")
    assert {"table": "run", "rows": 2}.items() <= next(row for row in json.loads(out) if row["table"] == "run").items()
    code, out, _ = kvproof("export", "few.db", "--db", "all.db", "--json")
    assert (code, json.loads(out)["rows"]["cell_run"]) == (0, 4)
    code, out, _ = kvproof("export", "parquet", "--db", "all.db", "--json")
    assert (code, json.loads(out)["out"]) == (0, "parquet")
    assert kvproof("upgrade", "--db", "new.db")[:2] == (0, f"new.db: schema revision {session.newest_revision()}\n")


def test_check_ends_with_the_broken_rows(kvproof, tmp_path):
    engine, run_id = machine(tmp_path, "one")
    with writer(engine).begin() as connection:
        connection.exec_driver_sql("UPDATE run SET planned = 3")
    engine.dispose()
    code, out, err = kvproof("check", "--db", "one.db")
    assert (code, err) == (1, "1 broken\n")
    assert out == f"run {run_id}: finished: rows 2 != 3 planned, breaks: ended runs have every row\n"


def test_a_conflict_or_an_absent_source_is_one_line(kvproof, tmp_path):
    engine, _ = machine(tmp_path, "one")
    kvproof("merge", "one.db", "--db", "all.db")
    with writer(engine).begin() as connection:
        connection.exec_driver_sql("UPDATE run SET suite = 'other'")
    engine.dispose()
    for source, said in (("one.db", "error: run."), ("absent.db", "error: db: got 'absent.db'")):
        code, out, err = kvproof("merge", source, "--db", "all.db")
        assert (code, out, err.count("\n")) == (4, "", 1)
        assert err.startswith(said)


def test_whoever_imports_merging_alone_knows_every_table():
    """In a process of its own, as the command is: the other tests have imported everything by now."""
    code = "import db.merge as m; print(*(table.name for table in m.Base.metadata.sorted_tables))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == set(models.Base.metadata.tables)
