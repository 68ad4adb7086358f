"""The child's ends: whatever a child does, its executor answers with one outcome that says what happened."""

import os
import signal
import time

import pytest

from suite.e2e.matrix import executors
from suite.e2e.matrix.executors import STDERR_TAIL_BYTES, LocalExecutor
from tests.matrix_fakes import child, make_job, make_outcome


def run(tmp_path, body, timeout_s=20.0, memory_gib=None, **more):
    spool = tmp_path / "spool"
    spool.mkdir(exist_ok=True)
    return LocalExecutor(child(tmp_path, body), **more).run(make_job(timeout_s=timeout_s, memory_gib=memory_gib), spool)


def gone(pid):
    """Whether process `pid` has ended, reaped or not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def wait_gone(pid):
    deadline = time.monotonic() + 5
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return gone(pid)


def test_a_good_child_is_believed_and_what_it_printed_is_kept(tmp_path, capfd):
    outcome = run(
        tmp_path, "print('to stdout', flush=True); print('to stderr', file=sys.stderr); write(make_outcome())"
    )
    assert (outcome.status, outcome.exit_code, outcome.signal) == ("passed", 0, None)
    assert outcome.metrics == make_outcome().metrics
    assert outcome.stderr_tail == "to stdout\nto stderr"
    assert 0 < outcome.duration_s < 20
    assert outcome.duration_s != make_outcome().duration_s
    assert capfd.readouterr() == ("", "")


def test_the_child_gets_its_job(tmp_path):
    outcome = run(tmp_path, "write(make_outcome(reason=job.cell.backend + ' ' + job.arm.pool))")
    assert outcome.reason == "fa3 static"


CRASHES = {
    "exit code": ("sys.exit(7)", "exit_code", "exit code 7", 7, None),
    "traceback": ("raise ValueError('what happened')", "exit_code", "exit code 1", 1, None),
    "signal": ("os.kill(os.getpid(), signal.SIGSEGV)", "signal", "SIGSEGV", None, 11),
    "killed": ("write(make_outcome()); os.kill(os.getpid(), signal.SIGKILL)", "killed", "SIGKILL", None, 9),
    "real-time signal": ("os.kill(os.getpid(), 40)", "signal", "signal 40", None, 40),
    "death after its outcome": ("write(make_outcome()); sys.exit(3)", "exit_code", "after it wrote", 3, None),
    "no outcome": ("pass", "no_outcome", "wrote no outcome", 0, None),
    "empty": ("open(outcome_path, 'w')", "bad_outcome", "cannot be read", 0, None),
    "garbage": ("open(outcome_path, 'w').write('hello')", "bad_outcome", "cannot be read", 0, None),
    "no text": ("open(outcome_path, 'wb').write(bytes(range(256)))", "bad_outcome", "cannot be read", 0, None),
    "half": (
        "d = msgspec.json.encode(make_outcome()); open(outcome_path, 'wb').write(d[:len(d) // 2])",
        *("bad_outcome", "cannot be read", 0, None),
    ),
    "unknown field": (
        'open(outcome_path, \'w\').write(\'{"status": "passed", "speed": 3}\')',
        "bad_outcome",
        "speed",
        0,
        None,
    ),
    "unknown status": ("open(outcome_path, 'w').write('{\"status\": \"fine\"}')", "bad_outcome", "fine", 0, None),
    "not a number": (
        "write(make_outcome(metrics={'itl_ms': Metric(value=float('nan'), unit='ms', n=1)}))",
        *("bad_outcome", "Expected `float`, got `null`", 0, None),
    ),
    "a status that is not its own": ("write(make_outcome(status='skipped'))", "bad_outcome", "skipped", 0, None),
}


@pytest.mark.parametrize(("body", "code", "reason", "exit_code", "signal_"), CRASHES.values(), ids=CRASHES)
def test_every_bad_end_is_a_crash_with_its_cause(tmp_path, body, code, reason, exit_code, signal_):
    outcome = run(tmp_path, "print('last words', file=sys.stderr, flush=True)\n" + body)
    assert (outcome.status, outcome.reason_code) == ("crashed", code)
    assert reason in outcome.reason
    assert (outcome.exit_code, outcome.signal) == (exit_code, signal_)
    assert outcome.stderr_tail.startswith("last words")
    assert not outcome.metrics


def test_a_traceback_is_kept(tmp_path):
    outcome = run(tmp_path, "raise ValueError('what happened')")
    assert outcome.stderr_tail.endswith("ValueError: what happened")
    assert outcome.reason == "ended with exit code 1; the last it said: ValueError: what happened"


def test_a_command_that_does_not_start_is_a_crash(tmp_path):
    outcome = LocalExecutor((str(tmp_path / "absent"),)).run(make_job(), tmp_path)
    assert (outcome.status, outcome.reason_code) == ("crashed", "not_started")


def test_only_the_end_of_a_long_stderr_is_kept_and_without_nul(tmp_path):
    outcome = run(tmp_path, "os.write(2, b'x' * 1_000_000 + b'\\0\\xff the end'); sys.exit(1)")
    assert outcome.stderr_tail.endswith("x\ufffd\ufffd the end")
    assert len(outcome.stderr_tail) <= STDERR_TAIL_BYTES


def test_a_hanging_child_is_asked_to_end_and_its_last_words_kept(tmp_path):
    body = """
        def stop(*_):
            print('asked to end', file=sys.stderr, flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, stop)
        print('ready', file=sys.stderr, flush=True)
        time.sleep(60)
    """
    started = time.monotonic()
    outcome = run(tmp_path, body, timeout_s=3.0)
    assert (outcome.status, outcome.reason_code) == ("timed_out", "timeout")
    assert "3 s" in outcome.reason
    assert outcome.stderr_tail == "ready\nasked to end"
    assert time.monotonic() - started < 15


def test_a_child_that_does_not_listen_is_killed_with_all_it_started(tmp_path):
    body = f"""
        deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
        grandchild = subprocess.Popen([sys.executable, "-c", deaf])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{grandchild.pid}}")
        time.sleep(60)
    """
    outcome = run(tmp_path, body, timeout_s=3.0, grace_s=0.3)
    assert (outcome.status, outcome.signal) == ("timed_out", signal.SIGKILL)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert all(wait_gone(pid) for pid in pids)


def test_a_child_that_passed_leaves_nothing_running(tmp_path):
    body = f"""
        grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open({str(tmp_path / "pids")!r}, "w").write(str(grandchild.pid))
        write(make_outcome())
    """
    assert run(tmp_path, body).status == "passed"
    assert wait_gone(int((tmp_path / "pids").read_text()))


def test_an_outcome_of_a_child_out_of_time_does_not_count(tmp_path):
    outcome = run(tmp_path, "write(make_outcome()); time.sleep(60)", timeout_s=1.5)
    assert outcome.status == "timed_out"
    assert not outcome.metrics


def test_a_stop_ends_the_child(tmp_path):
    started = time.monotonic()
    outcome = run(tmp_path, "time.sleep(60)", stopped=lambda: time.monotonic() > started + 0.5)
    assert (outcome.status, outcome.reason_code, outcome.signal) == ("skipped", "interrupted", signal.SIGTERM)
    assert time.monotonic() - started < 15


def test_the_child_leads_its_own_session(tmp_path):
    outcome = run(tmp_path, "write(make_outcome(reason=f'{os.getsid(0) == os.getpid()}'))")
    assert outcome.reason == "True"


def test_a_child_over_its_memory_is_ended_and_says_so(tmp_path):
    body = """
        grandchild = "import time; held = bytearray(300_000_000); time.sleep(60)"
        subprocess.Popen([sys.executable, "-c", grandchild])
        time.sleep(60)
    """
    outcome = run(tmp_path, body, memory_gib=0.25)  # what it started counts too
    assert (outcome.status, outcome.reason_code) == ("crashed", "out_of_memory")
    assert "allowed are 0.25" in outcome.reason
    assert outcome.duration_s < 15


def test_a_child_under_its_memory_is_left_alone(tmp_path):
    assert run(tmp_path, "time.sleep(0.4); write(make_outcome())", memory_gib=2.0).status == "passed"


def test_a_kill_while_the_kernel_killed_for_memory_is_want_of_memory(tmp_path, monkeypatch):
    counts = iter([3, 4])
    monkeypatch.setattr(executors, "oom_kills", lambda: next(counts))
    outcome = run(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert (outcome.status, outcome.reason_code, outcome.signal) == ("crashed", "out_of_memory", 9)


def test_a_child_sees_its_slots_gpu_alone(tmp_path):
    command = child(tmp_path, "write(make_outcome(reason=os.environ.get('CUDA_VISIBLE_DEVICES', 'all')))")
    for gpu, said in (("GPU-1", "GPU-1"), (None, os.environ.get("CUDA_VISIBLE_DEVICES", "all"))):
        folder = tmp_path / said
        folder.mkdir()
        assert LocalExecutor(command).run(make_job(), folder, gpu).reason == said
