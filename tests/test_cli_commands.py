"""The command as its users meet it: data on stdout, progress on stderr, exit codes, one line per error."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from db.queries import Ended
from suite import cli
from suite.e2e.matrix import executors, preflight
from suite.e2e.report.demo import demo_verdict
from tests.matrix_fakes import child

ROOT = Path(__file__).parents[1]
STATUS_KEYS = ["run", "planned", "passed", "wrong", "refused", "crashed", "timed_out", "skipped"]
CHILD = """
outcome = make_outcome(launcher=job.cell.launcher)
if job.arm.plants and {caught}:
    logits = outcome.samples[0].unpack() + 1
    outcome = replace(outcome, samples=(Samples.pack("logits", logits), *outcome.samples[1:]))
match job.cell.backend, job.arm.pool:
    case {crash!r}, "unified": sys.exit(5)
    case {refuse!r}, _: write(replace(make_outcome(status="refused", reason="needs [sm_90]"), metrics={{}}, samples=()))
    case _: write(outcome)
"""
MATRIX = """
name = "test"
[defaults]
family = "engine"
model = "checkpoint"
device = "cpu"
dtype = "float32"
page_size = 16
graph = true
seed = 1
timeout_s = 30
launcher = "reference"
pool = ["static", "unified"]
workload = "w"
[workloads.w]
requests = 1
prompt_tokens = 8
new_tokens = 1
batch = 1
chunk_tokens = 8
[[cells]]
backend = ["reference", "fa3"]
"""


@pytest.fixture
def kvproof(tmp_path, monkeypatch, capsys):
    """Runs a command in an empty folder with a matrix; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "matrix.toml").write_text(MATRIX)

    def run(*arguments, caught=True, crash="", refuse=""):
        body = CHILD.format(caught=caught, crash=crash, refuse=refuse)
        monkeypatch.setattr(executors, "CHILD_COMMAND", child(tmp_path, body))
        monkeypatch.setattr(preflight, "check_models", lambda plan: None)  # the fake children load no checkpoint
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            cli.main(list(arguments))
        printed = capsys.readouterr()
        return exit_.value.code, printed.out, printed.err

    return run


def test_run_show_and_compare_in_json(kvproof, tmp_path):
    code, out, err = kvproof("run", "matrix.toml", "--json")
    summary = json.loads(out.splitlines()[-1])
    assert list(summary) == STATUS_KEYS
    assert (code, summary["planned"], summary["passed"]) == (0, 4, 4)
    assert err.count(": passed in ") == 4
    assert (tmp_path / "kvproof.db").exists()

    code, out, err = kvproof("show", "--json")
    rows = json.loads(out)
    keys = ["cell", "family", "model", "backend", "pool", "label", "launcher", "block", "attempt", "status", "reason"]
    keys += ["void_reason", "metrics"]
    assert (code, err, len(rows), list(rows[0])) == (0, "", 4, keys)
    assert rows[1]["metrics"]["max_logit_diff"] == {"value": 0.0, "unit": "logit", "n": 128}

    code, out, _ = kvproof("compare", summary["run"], "--json")
    rows = json.loads(out)
    assert list(rows[0]) == ["cell", "metric", "static", "unified", "delta", "ratio", "blocks", "verdict"]
    assert {row["verdict"] for row in rows if row["metric"] == "max_logit_diff"} == {"equal"}
    assert code == 0


def test_a_plant_makes_the_run_wrong_and_is_named(kvproof):
    code, out, err = kvproof("run", "matrix.toml", "--json", "--plant", "read_skips_translation", "--db", "other.db")
    summary = json.loads(out.splitlines()[-1])
    assert (code, summary["planned"], summary["passed"], summary["wrong"]) == (1, 5, 4, 1)
    assert "unified+read_skips_translation: wrong" in err
    _, out, _ = kvproof("compare", "--json", "--metric", "max_logit_diff", "--db", "other.db")
    verdicts = [(row["cell"].partition("+")[2], row["verdict"]) for row in json.loads(out)]
    assert verdicts == [("", "equal"), ("read_skips_translation", "differs"), ("", "equal")]


def test_tables_say_the_same(kvproof):
    code, out, err = kvproof("run", "matrix.toml", refuse="fa3")
    assert code == 0
    assert "passed" in out
    assert "needs [sm_90]" in out
    assert "needs [sm_90]" in err
    _, out, _ = kvproof("show")
    assert "moved_share" in out
    _, out, _ = kvproof("compare")
    assert "not judged: 1 block" in out
    assert "missing" in out


def test_a_crash_is_exit_code_3(kvproof):
    code, out, _ = kvproof("run", "matrix.toml", "--json", crash="fa3")
    assert (code, json.loads(out)["crashed"]) == (3, 1)


def test_the_demo_is_green_exactly_when_only_the_plant_is_red(kvproof, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "DEMO_MATRIX", tmp_path / "matrix.toml")
    code, out, err = kvproof("demo")
    assert code == 0
    assert out.splitlines()[-1].startswith("PROVED: 4 of 4 rows passed, and the planted fault read_skips_translation")
    for heading in (
        "planted fault",
        "launcher",
        "status",
        "accuracy",
        "largest logit diff",
        "median ITL ms",
        "pages moved",
    ):
        assert heading in out
    assert err.count(" in ") == 5
    for trouble in ({"caught": False}, {"crash": "fa3"}, {"refuse": "fa3"}):
        code, out, _ = kvproof("demo", **trouble)
        assert code == 1
        assert out.splitlines()[-1].startswith("NOT PROVED: ")


def ended(status, plants=()):
    row = {"backend": "fa3", "pool": "unified", "status": status}
    return Ended(cell_id="c", block=0, plants=list(plants), show=row)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([ended("passed"), ended("wrong", ["fault"])], "PROVED: 1 of 1"),
        ([ended("passed"), ended("crashed", ["fault"])], "NOT PROVED: the planted fault fault ended as crashed"),
        ([ended("passed"), ended("passed", ["fault"])], "NOT PROVED: the planted fault fault ended as passed"),
        ([ended("wrong"), ended("wrong", ["fault"])], "NOT PROVED: fa3 unified wrong"),
        ([ended("skipped"), ended("wrong", ["fault"])], "NOT PROVED: fa3 unified skipped"),
        ([ended("passed")], "NOT PROVED: 0 planted rows"),
        ([ended("passed"), *[ended("wrong", ["fault"])] * 2], "NOT PROVED: 2 planted rows"),
        ([ended("wrong", ["fault"])], "NOT PROVED: no real row"),
        ([], "NOT PROVED: no real row"),
    ],
)
def test_the_demos_verdict(rows, said):
    verdict = demo_verdict(rows)
    assert verdict.text.startswith(said)
    assert verdict.proved == said.startswith("PROVED")


BAD = {
    "no such matrix": (["run", "absent.toml"], "matrix: got 'absent.toml'"),
    "unknown fault": (["run", "matrix.toml", "--plant", "x"], "plant: got 'x'"),
    "folder as database": (["run", "matrix.toml", "--db", "checkpoint"], "db: got 'checkpoint'"),
    "database nowhere": (["run", "matrix.toml", "--db", "no/where.db"], "db: got 'no/where.db'"),
    "text as database": (["run", "matrix.toml", "--db", "matrix.toml"], "db: got 'matrix.toml'"),
    "nothing to show": (["show"], "db: got 'kvproof.db'"),
    "nothing to compare": (["compare", "--db", "x.db"], "db: got 'x.db'"),
    "missing argument": (["run"], "Missing argument"),
    "unknown option": (["show", "--jsno"], "No such option"),
    "unknown command": (["shwo"], "No such command"),
    "too many arguments": (["doctor", "x"], "unexpected extra argument"),
}


@pytest.mark.parametrize(("arguments", "expected"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_exit_code_4_and_nothing_written(kvproof, tmp_path, arguments, expected):
    code, out, err = kvproof(*arguments)
    assert code == 4
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert expected in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "child.py", "matrix.toml"]


def test_a_bad_field_is_found_before_anything_is_opened(kvproof, tmp_path):
    (tmp_path / "matrix.toml").write_text(MATRIX.replace('"fa3"', '"fa33"'))
    code, _, err = kvproof("run", "matrix.toml")
    assert (code, err.count("\n")) == (4, 1)
    assert "cells[0].backend: got 'fa33'" in err
    assert "did you mean 'fa3'" in err
    assert not (tmp_path / "kvproof.db").exists()


def test_unknown_runs_and_metrics_are_errors(kvproof):
    kvproof("run", "matrix.toml", "--json")
    code, out, err = kvproof("show", "nonsense", "--json")
    assert (code, out) == (4, "")
    assert err.startswith("error: run: got 'nonsense'")
    for command in ("show", "compare"):
        code, out, err = kvproof(command, "--metric", "itl", "--json")
        assert (code, out) == (4, "")
        assert "did you mean 'itl_ms'" in err


def test_an_error_of_ours_is_a_traceback_and_not_a_verdict(kvproof, monkeypatch):
    def broken(*arguments, **options):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(cli, "execute", broken)
    code, out, err = kvproof("run", "matrix.toml")
    assert (code, out) == (3, "")
    assert "Traceback" in err


def test_doctor_says_what_runs_here(kvproof, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code, out, _ = kvproof("doctor", "--json")
    rows = {row["backend"]: row for row in json.loads(out)}
    assert code == 0
    assert {"reference", "triton", "fa3"} <= set(rows)
    for row in rows.values():
        assert list(row) == ["backend", "family", "usable", "launchers", "refusal"]
        assert row["usable"] == (row["refusal"] is None) == bool({"native", "interpreter"} & set(row["launchers"]))
    assert rows["triton"]["usable"]
    assert "reference" in rows["fa3"]["launchers"]
    code, out, _ = kvproof("doctor")
    assert "refusal" in out


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_names_every_command(kvproof, arguments):
    code, out, _ = kvproof(*arguments)
    assert code == 0
    for command in ("run", "resume", "show", "compare", "doctor", "demo", "db"):
        assert f"  {command} " in out


HELP = {
    "run": [
        "MATRIX.toml",
        "--db URL",
        "--json",
        "--plant FAULT",
        '"timed_out", "skipped"',
        "Exit code 0",
        "kvproof.db",
        *("--dry-run", "--shard I/N", "--budget SECONDS", "--jobs N", "--retries N", "--seed", "--launcher"),
    ],
    "resume": ["RUN", "--db URL", "--json", "--budget SECONDS", "--jobs N", "--retries N", "unfinished"],
    "show": ["RUN", "--db URL", "--json", "--metric NAME", '"void_reason", "metrics"', "latest run"],
    "compare": ["RUN", "--db URL", "--json", "--metric NAME", '"blocks", "verdict"', "not judged", "blocks", "void"],
    "doctor": ["--json", '"launchers", "refusal"'],
    "demo": ["--db URL", "planted", "Exit code 0"],
}


@pytest.mark.parametrize(("command", "words"), HELP.items(), ids=HELP)
def test_the_help_of_each_command_is_its_documentation(kvproof, command, words):
    code, out, _ = kvproof(command, "--help")
    assert code == 0
    text = " ".join(out.split())
    for word in words:
        assert word in text


def test_the_installed_command_answers_and_fails_with_its_codes(tmp_path):
    command = [sys.executable, "-m", "suite.cli"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for arguments, code in ((["--help"], 0), (["show"], 4), (["--nonsense"], 4)):
        done = subprocess.run([*command, *arguments], cwd=tmp_path, env=environment, capture_output=True, check=False)
        assert done.returncode == code
    assert list(tmp_path.iterdir()) == []
