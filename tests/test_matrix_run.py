"""The parent: every planned arm is one row, judged, in order, also when it is stopped in the middle."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sqlalchemy as sa

from db import models
from db.queries import ended_rows
from db.runs import run_counts
from db.session import open_db
from suite.e2e.matrix import ruling
from suite.e2e.matrix.execution import Options
from suite.e2e.matrix.plan import Plan, PlannedCell
from suite.e2e.matrix.run import RunSummary, run_plan
from suite.e2e.matrix.spool import SPOOL, Spool
from suite.e2e.matrix.stop import Stop
from suite.errors import InvariantError
from suite.records import STATUSES, Arm
from tests.db_support import empty_postgres, postgres
from tests.matrix_fakes import child, make_cell
from tests.test_matrix_executor import gone, wait_gone

ROOT = Path(__file__).parents[1]
BOTH = (Arm(pool="static"), Arm(pool="unified"))
PLANTED = (*BOTH, Arm(pool="unified", plants=("read_skips_translation",)))
GOOD = """
outcome = make_outcome(launcher=job.cell.launcher)
if job.arm.plants:
    logits = outcome.samples[0].unpack() + 1
    outcome = replace(outcome, samples=(Samples.pack("logits", logits), *outcome.samples[1:]))
"""


def plan_of(*backends, arms=BOTH, timeout_s=20.0):
    cells = tuple(PlannedCell(cell=make_cell(backend=b), arms=arms, timeout_s=timeout_s) for b in backends)
    return Plan(name="test", cells=cells)


@pytest.fixture
def engine(tmp_path):
    engine = open_db(tmp_path / "results.db")
    yield engine
    engine.dispose()


def statuses(engine, summary):
    return [row.show["status"] for row in ended_rows(engine, summary.run)]


def run_row(engine):
    with engine.connect() as connection:
        return connection.execute(sa.select(models.Run)).one()


def test_a_good_run_passes_and_its_planted_arm_is_wrong(engine, tmp_path):
    seen = []
    plan = plan_of("fa3", "triton", arms=PLANTED)
    command = child(tmp_path, GOOD + "write(outcome)")
    options = Options(command=command, progress=lambda n, job, outcome: seen.append((n, outcome)))
    summary = run_plan(plan, engine, options)
    assert statuses(engine, summary) == ["passed", "passed", "wrong"] * 2
    assert (summary.planned, summary.exit_code) == (6, 1)
    assert run_counts(engine, summary.run) == summary.statuses
    rows = ended_rows(engine, summary.run)
    assert rows[1].show["metrics"]["max_logit_diff"]["value"] == 0.0
    assert rows[2].show["metrics"]["max_logit_diff"]["value"] == pytest.approx(1.0, abs=1e-6)
    assert "itl_ms" not in rows[2].show["metrics"]
    assert run_row(engine).state == "finished"
    assert [n for n, outcome in seen if outcome is None] == list(range(6))
    assert [outcome.status for _, outcome in seen if outcome] == statuses(engine, summary)


def test_the_exactness_is_kept_as_a_comparison(engine, tmp_path):
    run_plan(plan_of("fa3", arms=PLANTED), engine, Options(command=child(tmp_path, GOOD + "write(outcome)")))
    with engine.connect() as connection:
        found = connection.execute(sa.select(models.Comparison).order_by(models.Comparison.id)).all()
    verdicts = [(row.metric, row.verdict) for row in found]
    assert verdicts == [
        *(("max_logit_diff", "equal"), ("token_mismatches", "equal")),
        *(("max_logit_diff", "differs"), ("token_mismatches", "equal")),
    ]
    assert len({row.static_id for row in found}) == 1


MIXED = (
    GOOD
    + """
match job.cell.backend, job.arm.pool:
    case "refused", _: write(replace(make_outcome(status="refused", reason="needs sm_90"), metrics={}, samples=()))
    case "crash", "unified": sys.exit(5)
    case "signal", "static": os.kill(os.getpid(), signal.SIGSEGV)
    case "hang", "unified": time.sleep(60)
    case "liar", "static": write(make_outcome(metrics={"speed": Metric(value=1.0, unit="m/s", n=1)}))
    case "tampered", "unified":
        write(replace(outcome, samples=tuple(replace(s, sha256="0" * 64) for s in outcome.samples)))
    case "latency", "unified": write(make_outcome(status="wrong", reason="but fast"))
    case _: write(outcome)
"""
)


def test_each_end_is_its_own_row_and_the_rest_goes_on(engine, tmp_path):
    plan = plan_of("refused", "crash", "signal", "hang", "liar", "tampered", "latency", "last", timeout_s=4.0)
    summary = run_plan(plan, engine, Options(command=child(tmp_path, MIXED)))
    assert statuses(engine, summary) == [
        *("refused", "refused"),
        *("passed", "crashed"),
        *("crashed", "passed"),
        *("passed", "timed_out"),
        *("crashed", "passed"),
        *("passed", "crashed"),
        *("passed", "crashed"),
        *("passed", "passed"),
    ]
    assert summary.exit_code == 3
    rows = ended_rows(engine, summary.run)
    assert "SIGSEGV" in rows[4].show["reason"]
    assert "max_logit_diff" not in rows[5].show["metrics"]
    assert "speed" in rows[8].show["reason"]
    assert "sha256" in rows[11].show["reason"]
    assert "no latency" in rows[13].show["reason"]
    with engine.connect() as connection:
        planned = connection.execute(sa.select(models.CellRun.cell_id, models.CellRun.arm_id)).all()
    assert len(planned) == len(set(planned)) == 16


@pytest.mark.parametrize(
    ("counts", "interrupted", "code"),
    [
        ({"passed": 4}, False, 0),
        ({"passed": 2, "refused": 2}, False, 0),
        ({"passed": 3, "wrong": 1}, False, 1),
        ({"passed": 3, "crashed": 1}, False, 3),
        ({"passed": 3, "timed_out": 1}, False, 3),
        ({"wrong": 2, "crashed": 2}, False, 1),
        ({"passed": 2, "skipped": 2}, True, 130),
    ],
)
def test_the_exit_code_says_what_the_run_came_to(counts, interrupted, code):
    from collections import Counter

    assert RunSummary(run="r", planned=4, statuses=Counter(counts), interrupted=interrupted).exit_code == code


def test_the_spool_is_beside_the_database_and_gone_afterwards(engine, tmp_path):
    body = GOOD + f"open({str(tmp_path / 'where')!r}, 'a').write(job_path + '\\n'); write(outcome)"
    run_plan(plan_of("fa3"), engine, Options(command=child(tmp_path, body)))
    places = [Path(line) for line in (tmp_path / "where").read_text().splitlines()]
    assert len({place.parent for place in places}) == 2
    assert not any(place.parent.exists() for place in places)
    assert all(place.is_relative_to(tmp_path) and SPOOL in str(place) for place in places)
    assert not list(tmp_path.glob(f"{SPOOL}*"))


def test_an_error_of_ours_still_leaves_one_row_per_arm(engine, tmp_path, monkeypatch):
    judge, calls = ruling.judge, []

    def broken(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise InvariantError("1 + 1 != 3")
        return judge(*arguments)

    monkeypatch.setattr(ruling, "judge", broken)
    with pytest.raises(InvariantError, match="1 \\+ 1"):
        run_plan(plan_of("fa3", "triton"), engine, Options(command=child(tmp_path, GOOD + "write(outcome)")))
    row = run_row(engine)
    shown = [r.show for r in ended_rows(engine, row.id)]
    assert [(r["status"], r["reason"].partition(":")[0]) for r in shown] == [("skipped", "parent_failed")] * 4
    assert (row.state, row.lease_owner) == ("failed", None)
    assert not list(tmp_path.glob(f"{SPOOL}*"))


def test_a_run_into_postgresql(tmp_path):
    with postgres() as url:
        empty_postgres(url)
        engine = open_db(url)
        summary = run_plan(
            plan_of("fa3", arms=PLANTED), engine, Options(command=child(tmp_path, GOOD + "write(outcome)"))
        )
        assert statuses(engine, summary) == ["passed", "passed", "wrong"]
        engine.dispose()


DRIVER = """
import sys
sys.path.insert(0, {root!r})
from suite.e2e.matrix import executors, preflight
executors.CHILD_COMMAND = {command!r}
preflight.check_models = lambda plan: None  # the fake children load no checkpoint
from suite.cli import main
main(sys.argv[1:])
"""

MATRIX = """
name = "test"
[defaults]
family = "engine"
model = {model!r}
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
prompt_tokens = 8
new_tokens = 1
batch = 1
chunk_tokens = 8
[[cells]]
backend = ["reference", "fa3", "triton"]
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_ends_its_child_and_every_row(tmp_path, number):
    body = (
        GOOD
        + f"""
if job.arm.pool == "unified":
    open({str(tmp_path / "pid")!r} + ".new", "w").write(str(os.getpid()))
    os.rename({str(tmp_path / "pid")!r} + ".new", {str(tmp_path / "pid")!r})
    time.sleep(60)
write(outcome)
"""
    )
    (tmp_path / "matrix.toml").write_text(MATRIX.format(model=str(tmp_path)))
    (tmp_path / "driver.py").write_text(DRIVER.format(root=str(ROOT), command=child(tmp_path, body)))
    arguments = [sys.executable, "driver.py", "run", "matrix.toml", "--json"]
    with subprocess.Popen(
        arguments,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a background job of a shell starts with SIGINT ignored, and an ignored signal stays ignored
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    ) as parent:
        try:
            deadline = time.monotonic() + 20
            while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            os.kill(parent.pid, number)
            stdout, stderr = parent.communicate(timeout=20)
        finally:
            parent.kill()
    assert parent.returncode == 130, stderr
    summary = json.loads(stdout.splitlines()[-1])
    assert {name: summary[name] for name in STATUSES if summary[name]} == {"passed": 1, "skipped": 5}
    assert summary["planned"] == 6
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    engine = open_db(tmp_path / "kvproof.db", create=False)
    rows = ended_rows(engine, summary["run"])
    assert [row.show["status"] for row in rows] == ["passed"] + ["skipped"] * 5
    assert all("interrupted" in row.show["reason"] for row in rows[1:])
    assert run_row(engine).state == "interrupted"
    engine.dispose()
    assert not list(tmp_path.glob(f"{SPOOL}*"))


def test_runs_that_overlap_do_not_take_each_others_spool(tmp_path):
    first, second = (Spool.of(run_id, tmp_path) for run_id in ("one", "two"))
    first.create()
    second.create()
    assert first.folder != second.folder
    second.remove()
    assert first.folder.is_dir()
    assert not second.folder.exists()


def test_a_signal_that_is_ignored_stays_ignored():
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup leaves it
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Stop().listening():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGINT) != signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGHUP, hangup)
        signal.signal(signal.SIGINT, interrupt)


ORPHAN = """
import os, subprocess, sys, time
sys.path.insert(0, {root!r})
from suite.e2e.matrix import cell
def execute(job):
    print(os.getpid(), subprocess.Popen(["sleep", "60"]).pid, flush=True)
    time.sleep(60)
cell.PARENT_POLL_S, cell.execute = 0.05, execute
cell.main(sys.argv[1:])
"""
SHORT_LIVED = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from suite.e2e.matrix.executors import LocalExecutor
from tests.matrix_fakes import make_job
LocalExecutor((sys.executable, "-c", {orphan!r})).run(make_job(), Path({folder!r}))
"""


def test_a_child_does_not_outlive_a_parent_that_was_killed(tmp_path):
    code = SHORT_LIVED.format(root=str(ROOT), folder=str(tmp_path), orphan=ORPHAN.format(root=str(ROOT)))
    parent = subprocess.Popen([sys.executable, "-c", code])
    said = tmp_path / "stderr"  # a child's stdout goes there too
    deadline = time.monotonic() + 20
    while not (said.exists() and said.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.02)
    pids = [int(pid) for pid in said.read_text().split()]
    assert len(pids) == 2
    assert not any(gone(pid) for pid in pids)
    parent.kill()
    parent.wait()
    assert all(wait_gone(pid) for pid in pids)


def test_the_parent_stays_small_and_without_torch(tmp_path):
    (tmp_path / "matrix.toml").write_text(MATRIX.format(model=str(tmp_path)))
    driver = DRIVER.format(root=str(ROOT), command=child(tmp_path, GOOD + "write(outcome)")).replace(
        "main(sys.argv[1:])",
        """
try:
    main(sys.argv[1:])
finally:
    heavy = [name for name in ("torch", "triton", "lm_eval", "transformers") if name in sys.modules]
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))  # of this program alone
    print(int(peak.split()[1]) // 1024, heavy, file=sys.stderr)
""",
    )
    (tmp_path / "driver.py").write_text(driver)
    done = subprocess.run(
        [sys.executable, "driver.py", "run", "matrix.toml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    mib, heavy = done.stderr.splitlines()[-1].split(" ", 1)
    assert int(mib) < 300
    assert heavy == "[]"
