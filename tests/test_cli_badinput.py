"""A careless user: whatever is wrong is one line on stderr and exit code 4, and nothing is left behind."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from db.session import open_db
from suite import cli
from suite.e2e.accuracy.task import load_task
from suite.e2e.matrix import preflight
from suite.e2e.matrix.measure import measure
from suite.e2e.matrix.plan import load_plan
from suite.errors import InputError, RefusedError
from suite.models.registry import resolve_model
from tests.matrix_fakes import make_job

ROOT = Path(__file__).parents[1]
MATRIX = """name = "careless"
[defaults]
family = "engine"
model = "gpt-oss-mini"
device = "cpu"
dtype = "float32"
page_size = 16
graph = true
seed = 1
timeout_s = 60
launcher = "reference"
pool = ["static", "unified"]
workload = "w"
[workloads.w]
requests = 1
prompt_tokens = 32
new_tokens = 2
batch = 1
chunk_tokens = 32
[[cells]]
backend = "reference"
"""
TASKS = "tasks = {%s}\n[[cells]]"
# what is replaced in the matrix, what by, and what the error says; each names field, value and expectation
CARELESS = {
    "a line break in a key": ("seed = 1", '"a\\nb" = 1', r"defaults.a\nb: got 'a\nb', expected one of backend"),
    "a line break in a name": ('"careless"', '"a\\nb"', r"name: got 'a\nb', expected a string without line breaks"),
    "NUL in a name": ('"careless"', '"a\\u0000b"', r"name: got 'a\x00b', expected a string without"),
    "NUL in a workload's name": ("[workloads.w]", '[workloads."\\u0000"]', r"workloads: got '\x00', expected a string"),
    "a page of 2**31": ("= 16", "= 2147483648", "defaults.page_size: got 2147483648, expected an integer, at most"),
    "a seed of 20 digits": ("seed = 1", "seed = 18446744073709551616", "expected an integer, at most 2147483647"),
    "a number of 5000 digits": ("seed = 1", f"seed = {'9' * 5000}", "matrix: got 'matrix.toml', expected valid TOML"),
    "5000 brackets": ("seed = 1", f"seed = {'[' * 5000}", "matrix: got 'matrix.toml', expected valid TOML"),
    "a path too long": ('"gpt-oss-mini"', f'"{"a" * 5000}"', "... (5002 characters), expected one of "),
    "a folder misspelt": ('"gpt-oss-mini"', '"checkpoint"', " or a checkpoint folder"),
    "a prompt too short": (
        "[[cells]]",
        TASKS % '"recall@3" = 1',
        "w.tasks.recall@3: got 3, expected at least",
    ),
    "too few to choose": ("[[cells]]", TASKS % '"recall_choice@8" = 1', "w.tasks.recall_choice@8: got 4, expected at"),
    "a length of 5000 digits": ("[[cells]]", TASKS % f'"recall@{"9" * 5000}" = 1', "of at most 9 digits"),
    "a length spelt twice": ("[[cells]]", TASKS % '"recall@096" = 1', "got 'recall@096', expected recall@LENGTH"),
    "digits of another script": ("[[cells]]", TASKS % '"recall@\\u0663" = 1', "expected recall@LENGTH"),
}


@pytest.fixture
def kvproof(tmp_path, monkeypatch, capsys):
    """Runs a command in an empty folder with a matrix; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "matrix.toml").write_text(MATRIX)

    def run(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            cli.main(list(arguments))
        printed = capsys.readouterr()
        return exit_.value.code, printed.out, printed.err

    return run


def assert_refused(result, said, folder):
    code, out, err = result
    assert (code, out, err.count("\n")) == (4, "", 1)
    assert err.startswith("error: ")
    assert said in err
    assert [path.name for path in folder.iterdir()] == ["matrix.toml"]


@pytest.mark.parametrize(("old", "new", "said"), CARELESS.values(), ids=CARELESS)
def test_a_careless_matrix_is_one_line(kvproof, tmp_path, old, new, said):
    assert MATRIX.count(old) == 1
    (tmp_path / "matrix.toml").write_text(MATRIX.replace(old, new))
    assert_refused(kvproof("run", "matrix.toml", "--json"), said, tmp_path)


DATABASES = {
    "in memory": (":memory:", "db: got ':memory:', expected a file: what is in memory is gone"),
    "in memory, as a URL": ("sqlite://", "db: got 'sqlite://', expected a file"),
    "no file in the URL": ("sqlite:///", "db: got 'sqlite:///', expected a file"),
    "a parameter": ("sqlite:///x.db?mode=ro", "expected sqlite:///x.db, without parameters"),
    "a URI in the URL": ("sqlite:///file:x.db?uri=true", "without parameters"),
}


@pytest.mark.parametrize(("db", "said"), DATABASES.values(), ids=DATABASES)
@pytest.mark.parametrize("command", [["run", "matrix.toml"], ["show"]], ids=["run", "show"])
def test_a_database_that_would_not_keep_the_run_is_refused_before_it(kvproof, tmp_path, command, db, said):
    assert_refused(kvproof(*command, "--db", db), said, tmp_path)


def test_a_workload_longer_than_the_model_is_refused_before_anything_runs(kvproof, tmp_path):
    longest = 16384  # the positions of gpt-oss-mini
    (tmp_path / "matrix.toml").write_text(MATRIX.replace("prompt_tokens = 32", f"prompt_tokens = {longest - 1}"))
    said = "workloads.w.prompt_tokens + new_tokens: got 16385, expected at most 16384 tokens, the positions of"
    assert_refused(kvproof("run", "matrix.toml", "--json"), said, tmp_path)


def test_every_length_is_held_to_the_positions(tmp_path):
    task, folder = f"recall@{90}", str(resolve_model("gpt-oss-mini"))
    longest = load_task(task).longest
    (tmp_path / "matrix.toml").write_text(MATRIX.replace("[[cells]]", TASKS % f'"{task}" = 1'))
    plan = load_plan(tmp_path / "matrix.toml")
    preflight.check_lengths(plan, {folder: longest})
    with pytest.raises(InputError, match=f"workloads.w.tasks.{task}: got {longest}, expected at most {longest - 1}"):
        preflight.check_lengths(plan, {folder: longest - 1})
    with pytest.raises(InputError, match="new_tokens: got 34, expected at most 33"):
        preflight.check_lengths(plan, {folder: 33})


def test_a_checkpoint_that_is_no_json_or_lacks_a_field_is_named(kvproof, tmp_path):
    shutil.copytree(resolve_model("gpt-oss-mini"), tmp_path / "mine")
    config = tmp_path / "mine" / "config.json"
    (tmp_path / "matrix.toml").write_text(MATRIX.replace("gpt-oss-mini", "mine"))
    fields = json.loads(config.read_text())
    del fields["head_dim"]
    for text, said in (
        (json.dumps(fields), "mine: head_dim: got 'nothing', expected the field to be present"),
        (json.dumps(fields | {"head_dim": 10**30}), "mine: head_dim: got 1000000000000000000000000000000, expected a"),
        ("[" * 100_000, "mine/config.json: got "),
    ):
        config.write_text(text)
        code, out, err = kvproof("run", "matrix.toml")
        assert (code, out, err.count("\n")) == (4, "", 1)
        assert said in err
        assert not (tmp_path / "kvproof.db").exists()


def test_a_damaged_database_is_one_line_and_a_wrong_statement_keeps_its_traceback(kvproof, tmp_path):
    open_db(tmp_path / "kvproof.db").dispose()
    with sqlite3.connect(tmp_path / "kvproof.db") as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        pages = connection.execute("SELECT rootpage FROM sqlite_master WHERE tbl_name = 'run'").fetchall()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    connection.close()
    sound = (tmp_path / "kvproof.db").read_bytes()
    damaged = bytearray(sound)
    for (page,) in pages:  # the table's and its indices'
        damaged[(page - 1) * size : page * size] = b"\xab" * size
    (tmp_path / "kvproof.db").write_bytes(damaged)
    code, out, err = kvproof("show")
    assert (code, out) == (3, "")
    assert (
        err == "error: db: got 'database disk image is malformed', expected a database that can be read and written\n"
    )
    (tmp_path / "kvproof.db").write_bytes(sound)
    with sqlite3.connect(tmp_path / "kvproof.db") as connection:
        connection.execute("ALTER TABLE run RENAME TO elsewhere")
    connection.close()
    code, _, err = kvproof("show")
    assert code == 3
    assert err.startswith("Traceback")


@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--json"]], ids=["help", "json"])
def test_a_reader_that_left_is_no_verdict(arguments, tmp_path):
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "suite.cli", *arguments],
            cwd=tmp_path, env=environment, stdout=write, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_cell_of_a_gpu_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RefusedError, match="fa3: needs a CUDA device, got a machine where torch finds none"):
        measure(make_job(device="cuda", dtype="bfloat16"))


def test_an_error_stays_one_short_line():
    error = InputError("a\x1b[31mb", "x" * 1000, "one\nline")
    assert str(error) == f"a\\x1b[31mb: got '{'x' * 199}... (1002 characters), expected one\\nline"
