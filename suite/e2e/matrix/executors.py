"""Running one job in a child process, whatever becomes of that process.

The child leads its own session, so that it and all it started can be ended as one group. An outcome
counts only when the child wrote it whole *and* left with exit code 0; every other end is an outcome
made here, from exit code, signal and the end of stderr.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from suite.records import CellJob, Outcome, Status

CHILD_COMMAND: tuple[str, ...] = (sys.executable, "-m", "suite.e2e.matrix.cell")
PARENT_STATUSES: tuple[Status, ...] = ("timed_out", "skipped")
PARENT_PID = "KVPROOF_PARENT_PID"  # in the child's environment: whom it must not outlive
STDERR_TAIL_BYTES = 4096
LAST_LINE_CHARS = 300
POLL_S = 0.01
GRACE_S = 5.0  # between SIGTERM and SIGKILL


class LocalExecutor:
    """Runs jobs on this machine, one at a time, with the files of each in a folder of its own under `spool`."""

    def __init__(
        self,
        spool: Path,
        command: Sequence[str] | None = None,
        grace_s: float = GRACE_S,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.spool, self.grace_s, self.stopped = spool, grace_s, stopped
        self.command = tuple(CHILD_COMMAND if command is None else command)
        self.jobs = 0

    def run(self, job: CellJob) -> Outcome:
        """The outcome of `job`; never raises for what the child does. Ends the child when `stopped()` turns true."""
        folder = self.spool / f"job-{self.jobs:05d}"
        self.jobs += 1
        folder.mkdir()
        job_path, outcome_path, stderr_path = folder / "job.json", folder / "outcome.json", folder / "stderr"
        job_path.write_bytes(msgspec.json.encode(job))
        started = time.monotonic()
        with stderr_path.open("wb") as stderr:
            try:
                child = subprocess.Popen(
                    [*self.command, str(job_path), str(outcome_path)],
                    stdin=subprocess.DEVNULL,
                    stdout=stderr,  # the parent's stdout carries data
                    stderr=stderr,
                    start_new_session=True,
                    env={**os.environ, PARENT_PID: str(os.getpid())},
                )
            except OSError as error:
                return Outcome(status="crashed", reason_code="not_started", reason=f"the child did not start: {error}")
            cut_short = self.wait(child, started + job.timeout_s)
        stderr_tail = read_tail(stderr_path)
        outcome = conclude(job, cut_short, child.returncode, outcome_path)
        if outcome.reason_code in ("signal", "exit_code") and stderr_tail:
            last_line = stderr_tail.splitlines()[-1][:LAST_LINE_CHARS]
            outcome = replace(outcome, reason=f"{outcome.reason}; the last it said: {last_line}")
        return replace(
            outcome,
            duration_s=time.monotonic() - started,
            exit_code=child.returncode if child.returncode >= 0 else None,
            signal=-child.returncode if child.returncode < 0 else None,
            stderr_tail=stderr_tail or None,
        )

    def wait(self, child: subprocess.Popen[bytes], deadline: float) -> Status | None:
        """Wait for the child's end and leave nothing of its group alive; says what cut it short, if anything did."""
        cut_short: Status | None = None
        try:
            while child.poll() is None and cut_short is None:
                if self.stopped():
                    cut_short = "skipped"
                elif time.monotonic() >= deadline:
                    cut_short = "timed_out"
                else:
                    time.sleep(POLL_S)
            if cut_short is not None:
                signal_group(child.pid, signal.SIGTERM)
                grace_end = time.monotonic() + self.grace_s
                while child.poll() is None and time.monotonic() < grace_end:
                    time.sleep(POLL_S)
        finally:
            signal_group(child.pid, signal.SIGKILL)
            child.wait()
        return cut_short


def signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:  # nobody is left in it
        return


def conclude(job: CellJob, cut_short: Status | None, returncode: int, outcome_path: Path) -> Outcome:
    """The outcome of a child that has ended."""
    if cut_short == "timed_out":
        return Outcome(status="timed_out", reason_code="timeout", reason=f"not done after {job.timeout_s:g} s")
    if cut_short == "skipped":
        return Outcome(status="skipped", reason_code="interrupted", reason="interrupted while it ran")
    if returncode < 0:
        return crashed("signal", f"ended by {signal_name(-returncode)}")
    if returncode > 0:
        wrote = ", after it wrote an outcome" if outcome_path.exists() else ""
        return crashed("exit_code", f"ended with exit code {returncode}{wrote}")
    try:
        outcome = msgspec.json.decode(outcome_path.read_bytes(), type=Outcome)
    except FileNotFoundError:
        return crashed("no_outcome", "ended with exit code 0 but wrote no outcome")
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return crashed("bad_outcome", f"wrote an outcome that cannot be read: {error}")
    if outcome.status in PARENT_STATUSES:
        return crashed("bad_outcome", f"wrote the status {outcome.status}, which only its parent may")
    return outcome


def crashed(reason_code: str, reason: str) -> Outcome:
    return Outcome(status="crashed", reason_code=reason_code, reason=reason)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def read_tail(path: Path) -> str:
    """The end of what the child wrote to stderr, as text a database can hold."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - STDERR_TAIL_BYTES))
        return file.read().decode(errors="replace").replace("\x00", "\ufffd").strip()
