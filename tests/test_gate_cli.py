"""The command `kvproof gate`: decisions, reports, replays, overrides and bad input."""

import json
import xml.etree.ElementTree as ET

import pytest

from db.session import open_db
from suite import cli
from suite.e2e.gate import emit, service
from tests.gate_rig import make_policy, store_run

TOML = """
name = "test"
alpha = 0.05
fdr = 0.05
power = 0.8
baseline = "static"
candidates = ["unified"]
launchers = ["reference"]
smoke = "not_required"
rows = { refused = "ignore", crashed = "fail", timed_out = "fail", skipped = "inconclusive" }
[endpoints.exact]
kind = "exact"
[endpoints.itl]
kind = "latency"
metric = "itl_ms"
margin = 0.02
looks = [4, 8]
fail_when = "beyond_margin"
[[cells]]
select = { family = "engine" }
endpoints = ["exact", "itl"]
min_cells = 1
"""


@pytest.fixture
def engine(tmp_path):
    engine = open_db(tmp_path / "results.db")
    yield engine
    engine.dispose()


@pytest.fixture
def files(tmp_path, engine):
    (tmp_path / "policy.toml").write_text(TOML)
    return tmp_path


def call(files, *arguments):
    return cli.invoke(["gate", *arguments, "--db", str(files / "results.db")])


def test_the_command_decides_writes_reports_and_replays(files, engine, capsys):
    store_run(engine, slowdown=0.06, replicate=True)
    reports = ("--junit", str(files / "j.xml"), "--markdown", str(files / "m.md"))
    assert call(files, "--policy", str(files / "policy.toml"), "--json", *reports) == 1
    out = json.loads(capsys.readouterr().out)
    assert (out["verdict"], out["exit_code"], out["policy"]) == ("FAIL", 1, "test")
    assert {e["endpoint"] for cell in out["cells"] for e in cell["evidence"]} == {"exact", "itl"}
    suite = ET.parse(files / "j.xml").getroot().find("testsuite")
    assert int(suite.get("tests")) == len(suite.findall("testcase")) == 7
    assert int(suite.get("failures")) == len(list(suite.iter("failure"))) == 3  # the endpoint, its cell, the run
    text = (files / "m.md").read_text()
    assert text.startswith("### kvproof gate `test`: FAIL")
    assert out["decision"] in text
    assert call(files, "--replay", out["decision"]) == 1
    captured = capsys.readouterr()
    assert "agrees, bit for bit" in captured.err
    assert "FAIL" in captured.out
    assert call(files, "--override", out["decision"], "--by", "Ada", "--reason", "known") == 0
    assert "Ada overrode FAIL: known" in capsys.readouterr().out


def test_a_refusal_leaves_a_red_report(files, engine, capsys):
    store_run(engine, state="running")
    assert call(files, "--policy", str(files / "policy.toml"), "--junit", str(files / "j.xml")) == 3
    suite = ET.parse(files / "j.xml").getroot().find("testsuite")
    assert suite.get("errors") == "1"
    assert "still running" in suite.find("testcase/error").get("message")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ([], "gate"),
        (["--policy", "p", "--replay", "x"], "gate"),
        (["--override", "x", "--by", "Ada"], "reason"),
        (["--override", "x", "--reason", "why"], "by"),
        (["--policy", "policy.toml", "--by", "Ada"], "by"),
        (["RUN", "--replay", "x"], "run"),
        (["--policy", "absent.toml"], "policy"),
        (["--replay", "x"], "decision"),
        (["--replay", ""], "decision"),
        (["nonsense", "--policy", "policy.toml"], "run"),
        (["--pin", "--by", "Ada", "--reason", "v1"], "pin"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_4(files, engine, capsys, monkeypatch, arguments, field):
    monkeypatch.chdir(files)
    store_run(
        engine, blocks=1, state="finished", changes={"status": "refused", "reason": "x", "metrics": {}, "samples": ()}
    )
    assert call(files, *arguments) == 4
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {field}: got ")
    assert captured.out == ""


def test_reports_hold_any_text(engine):
    reason = "a | b <b>c</b> `d` *e* \x1b[31m\n\\|"
    changes = {"status": "wrong", "reason_code": "logits_differ", "reason": reason, "metrics": {}, "samples": ()}
    store_run(engine, changes=changes)
    kept = service.run_gate(engine, None, make_policy())
    ET.fromstring(emit.junit(kept))
    rows = [line for line in emit.markdown(kept).splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {11}
    assert "<b>" not in "".join(rows)
