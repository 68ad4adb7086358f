"""A run that died is taken up where it was left: nothing lost, nothing doubled, nobody else's run touched."""

import os
import sqlite3

import pytest
import sqlalchemy as sa
from msgspec.structs import replace

from db import models
from db.invariants import broken_rows
from db.queries import ended_rows
from db.runs import run_record
from db.session import open_db
from db.store import LeaseLostError, Store
from suite.e2e.matrix import execution, lease
from suite.e2e.matrix import run as running
from suite.e2e.matrix.execution import Options
from suite.e2e.matrix.planned import Plan
from suite.e2e.matrix.run import resume_run, run_plan
from suite.e2e.matrix.spool import SPOOL, SpoolError
from suite.e2e.matrix.stop import Stop
from suite.errors import InputError
from tests.kill_campaign import CELLS, PLAN, REVISION, campaign
from tests.matrix_fakes import child

COUNTING = """
with open({where!r}, "a") as file:
    file.write(f"{{job.cell.backend}} {{job.arm.pool}} {{job.block}}\\n")
write(make_outcome())
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "code_revision", lambda: REVISION)  # the checkout may change meanwhile
    monkeypatch.setattr(running, "machine", lambda: {"cpu": "one"})
    engine = open_db(tmp_path / "results.db")
    yield engine
    engine.dispose()


def counting(tmp_path):
    return child(tmp_path, COUNTING.format(where=str(tmp_path / "ran")))


def ran(tmp_path):
    return (tmp_path / "ran").read_text().splitlines()


def rows(engine):
    with engine.connect() as connection:
        return connection.scalar(sa.select(sa.func.count()).select_from(models.CellRun))


def interrupt_after(jobs, monkeypatch):
    """Ask the run to stop once that many children have been started."""
    seen = []

    class Asked(Stop):
        def __call__(self):
            return self.asked

    stop = Asked()
    monkeypatch.setattr(running, "Stop", lambda: stop)

    def progress(number, job, outcome):
        if outcome is None:
            seen.append(number)
            stop.asked = len(seen) > jobs

    return progress


def test_what_was_interrupted_is_attempted_again_and_nothing_else(engine, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        options = Options(command=counting(tmp_path), progress=interrupt_after(3, patch))
        summary = run_plan(PLAN, engine, options, seed=3)
    assert (summary.exit_code, rows(engine), len(ran(tmp_path))) == (130, 8, 3)
    again = resume_run(engine, None, Options(command=counting(tmp_path)))
    assert (again.run, again.exit_code, again.statuses) == (summary.run, 0, {"passed": 8})
    assert len(ran(tmp_path)) == 3 + 6  # the first block was done; of the second an arm runs once more
    shown = [row.show for row in ended_rows(engine, again.run)]
    assert sorted(row["attempt"] for row in shown) == [1, 1, *[2] * 6]
    assert run_record(engine, again.run).state == "finished"
    assert broken_rows(engine) == []
    assert not list(tmp_path.glob(f"{SPOOL}*"))


def test_a_finished_run_has_nothing_left(engine, tmp_path):
    first = run_plan(PLAN, engine, Options(command=counting(tmp_path)))
    again = resume_run(engine, first.run, Options(command=("absent",)))
    assert (again.exit_code, rows(engine)) == (0, 8)


def test_a_run_whose_process_lives_is_left_alone(engine, tmp_path):
    refused = []

    def progress(number, job, outcome):
        if not refused:
            with pytest.raises(InputError, match=r"run: got .*a run that nobody executes: .* is alive") as caught:
                resume_run(engine, None, Options(command=("absent",)))
            refused.append(caught.value)

    assert run_plan(PLAN, engine, Options(command=counting(tmp_path), progress=progress)).exit_code == 0
    assert refused


CONDITIONS = {
    "revision": (
        "code_revision",
        lambda: replace(REVISION, sha="f00"),
        "revision: got 'f00', expected c0ffee, that of",
    ),
    "patch": (
        "code_revision",
        lambda: replace(REVISION, patch_sha="p"),
        "revision: got 'c0ffee + p', expected c0ffee, ",
    ),
    "machine": ("machine", lambda: {"cpu": "two"}, "machine.cpu: got 'two', expected 'one', that of the run"),
}


@pytest.mark.parametrize(("name", "other", "said"), CONDITIONS.values(), ids=CONDITIONS)
def test_other_conditions_are_refused_with_need_and_got(engine, tmp_path, monkeypatch, name, other, said):
    with monkeypatch.context() as patch:
        run_plan(PLAN, engine, Options(command=counting(tmp_path), progress=interrupt_after(1, patch)))
    monkeypatch.setattr(running, name, other)
    with pytest.raises(InputError) as caught:
        resume_run(engine)
    assert said in str(caught.value)
    assert rows(engine) == 8


def test_a_run_of_before_leases_cannot_be_resumed(engine, tmp_path):
    Store(engine).begin_run("old", {}, [], REVISION)
    with pytest.raises(InputError, match="no seed and no machine on record"):
        resume_run(engine)


def test_an_owner_elsewhere_is_alive_as_long_as_its_heart_beats(monkeypatch):
    from db.keys import utc_now

    now = utc_now()
    assert lease.alive(lease.owner(), now, now)
    gone = lease.owner().split()
    gone[2] = str(2**22 - 1)  # no such process
    assert not lease.alive(" ".join(gone), now, now)
    gone[2], gone[3] = str(os.getpid()), "1"  # the process id came again
    assert not lease.alive(" ".join(gone), now, now)
    elsewhere = "another-host boot 1 1"
    late = now.timestamp() - lease.SILENCE_S - 1
    assert lease.alive(elsewhere, now, now)
    assert not lease.alive(elsewhere, type(now).fromtimestamp(late, tz=now.tzinfo), now)


def test_who_lost_its_run_writes_no_more_of_it(engine, tmp_path):
    def progress(number, job, outcome):
        if outcome is None and number == 2:
            assert Store(engine, "somebody else").take_over(run_record_id(engine), lease.owner(), "elsewhere")

    with pytest.raises(LeaseLostError, match="another process has taken it over"):
        run_plan(PLAN, engine, Options(command=counting(tmp_path), progress=progress))
    record = run_record(engine, run_record_id(engine))
    assert (record.state, record.lease_owner) == ("running", "somebody else")
    assert rows(engine) < 8


def run_record_id(engine):
    with engine.connect() as connection:
        return connection.scalar(sa.select(models.Run.id))


def test_only_one_takes_a_run_over(engine, tmp_path):
    run_plan(PLAN, engine, Options(command=counting(tmp_path)))
    run_id = run_record_id(engine)
    assert Store(engine, "first").take_over(run_id, None, "a")
    assert not Store(engine, "second").take_over(run_id, None, "b")


def test_a_full_disk_leaves_the_run_resumable_with_one_error(engine, tmp_path, monkeypatch):
    from suite.e2e.matrix import spool

    conclude, calls = spool.Spool.conclude, []

    def full(self, job, attempt, concluded):
        calls.append(job)
        if len(calls) == 4:
            with spool.spool_errors():
                raise OSError(28, "No space left on device")
        conclude(self, job, attempt, concluded)

    with monkeypatch.context() as patch:
        patch.setattr(spool.Spool, "conclude", full)
        with pytest.raises(SpoolError, match="No space left on device"):
            run_plan(PLAN, engine, Options(command=counting(tmp_path)))
    assert run_record(engine, run_record_id(engine)).state == "failed"
    assert rows(engine) == 2
    assert resume_run(engine, None, Options(command=counting(tmp_path))).statuses == {"passed": 8}
    assert len(ran(tmp_path)) == 4 + 5  # the third outcome was noted, and is taken up
    assert broken_rows(engine) == []


def test_a_locked_database_leaves_the_run_resumable(engine, tmp_path, monkeypatch):
    lock = sqlite3.connect(tmp_path / "results.db", isolation_level=None, check_same_thread=False)

    def progress(number, job, outcome):
        if number == 2 and not lock.in_transaction:
            lock.execute("BEGIN IMMEDIATE")

    @sa.event.listens_for(engine, "connect")
    def impatient(connection, record):
        connection.execute("PRAGMA busy_timeout = 200")

    engine.dispose()
    with pytest.raises(sa.exc.OperationalError, match="locked"):
        run_plan(PLAN, engine, Options(command=counting(tmp_path), progress=progress))
    lock.execute("ROLLBACK")
    lock.close()
    record = run_record(engine, run_record_id(engine))
    assert (record.state, record.lease_owner) == ("running", lease.owner())
    monkeypatch.setattr(lease, "alive", lambda *owner: False)  # the process that ran into the lock is gone
    assert resume_run(engine, None, Options(command=counting(tmp_path))).statuses == {"passed": 8}
    assert broken_rows(engine) == []


KILLED_ONCE = """
mark = {where!r} + job.cell.backend
if job.arm.pool == "unified" and not os.path.exists(mark):
    open(mark, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
write(make_outcome())
"""
ONE = Plan(name="one", cells=(replace(CELLS[0], blocks=1),))


def test_infrastructure_is_retried_as_a_new_attempt_of_the_whole_block(engine, tmp_path):
    command = child(tmp_path, KILLED_ONCE.format(where=str(tmp_path / "mark-")))
    summary = run_plan(ONE, engine, Options(command=command, retries=1))
    assert (summary.exit_code, summary.statuses) == (0, {"passed": 2})
    with engine.connect() as connection:
        row = models.CellRun
        found = connection.execute(sa.select(row.attempt, row.status, row.reason_code).order_by(row.id)).all()
    assert [tuple(row) for row in found] == [
        (1, "passed", None),
        (1, "crashed", "killed"),
        (2, "passed", None),
        (2, "passed", None),
    ]
    assert broken_rows(engine) == []


def test_without_retries_it_is_left_for_resume(engine, tmp_path):
    command = child(tmp_path, KILLED_ONCE.format(where=str(tmp_path / "mark-")))
    assert run_plan(ONE, engine, Options(command=command)).exit_code == 3
    assert resume_run(engine, None, Options(command=command)).exit_code == 0


@pytest.mark.parametrize("body", ["sys.exit(3)", "os.kill(os.getpid(), signal.SIGSEGV)", "pass"])
def test_what_the_cell_did_itself_is_never_retried(engine, tmp_path, body):
    summary = run_plan(ONE, engine, Options(command=child(tmp_path, body), retries=3))
    assert (summary.exit_code, rows(engine)) == (3, 2)
    resume_run(engine, None, Options(command=("absent",)))
    assert rows(engine) == 2


def test_a_budget_drops_the_last_blocks_as_rows_that_say_so(engine, tmp_path):
    options = Options(command=counting(tmp_path), budget_s=2 * 24.0)  # a block is estimated at 2 x 12 s
    summary = run_plan(PLAN, engine, options)
    assert (summary.exit_code, summary.dropped, summary.statuses) == (0, 4, {"passed": 4, "skipped": 4})
    shown = [row.show for row in ended_rows(engine, summary.run)]
    assert {row["block"] for row in shown if row["status"] == "skipped"} == {1}
    assert all("budget" in row["reason"] for row in shown if row["status"] == "skipped")
    assert broken_rows(engine) == []
    resume_run(engine, None, Options(command=("absent",)))  # dropped on purpose is not unfinished
    assert rows(engine) == 8


def test_a_budget_that_is_spent_starts_nothing_more(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "within_budget", lambda blocks, budget_s, slots: len(blocks))  # estimates were wrong
    options = Options(command=child(tmp_path, "time.sleep(0.5); write(make_outcome())"), budget_s=0.6)
    summary = run_plan(PLAN, engine, options)
    assert summary.statuses["passed"] + summary.statuses["skipped"] == 8
    assert summary.statuses["skipped"] == summary.dropped >= 2
    assert summary.exit_code == 0


def test_slots_run_blocks_at_once_and_every_row_is_there(engine, tmp_path):
    body = f"""
        open({str(tmp_path)!r} + f"/at-{{os.getpid()}}", "w").close()
        time.sleep(0.3)
        at_once = len([name for name in os.listdir({str(tmp_path)!r}) if name.startswith("at-")])
        os.remove({str(tmp_path)!r} + f"/at-{{os.getpid()}}")
        write(make_outcome(effective={{"at_once": at_once}}))
    """
    summary = run_plan(PLAN, engine, Options(command=child(tmp_path, body), gpus=(None, None)))
    assert summary.statuses == {"passed": 8}
    with engine.connect() as connection:
        at_once = [effective["at_once"] for effective in connection.scalars(sa.select(models.CellRun.effective))]
    assert max(at_once) == 2
    assert broken_rows(engine) == []


def test_what_is_in_the_database_is_in_the_spool_no_more(engine, tmp_path):
    left = []

    def progress(number, job, outcome):
        if outcome is None:
            left.append(len(list(tmp_path.glob(f"{SPOOL}-*/*"))))

    run_plan(PLAN, engine, Options(command=counting(tmp_path), progress=progress))
    assert len(left) == 8
    assert max(left) <= 2  # the block at work, and one whose rows are being written


def test_a_heart_beats_while_nothing_ends(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(execution, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(execution, "LOOK_S", 0.05)
    seen = []
    heartbeat = Store.heartbeat
    monkeypatch.setattr(Store, "heartbeat", lambda self, run_id: (seen.append(run_id), heartbeat(self, run_id)))
    run_plan(ONE, engine, Options(command=child(tmp_path, "time.sleep(0.5); write(make_outcome())")))
    assert len(seen) >= 3


def test_kills_at_random_points_lose_and_double_nothing(tmp_path):
    wrong, hits = campaign(12, 7, tmp_path)
    assert wrong == []
    assert sum(hits.values()) > 0  # a busy machine decides whom the points hit
