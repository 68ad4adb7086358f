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

from suite.e2e.matrix.spool import note_child, spool_errors
from suite.records import CellJob, Outcome, Status

CHILD_COMMAND: tuple[str, ...] = (sys.executable, "-m", "suite.e2e.matrix.cell")
PARENT_STATUSES: tuple[Status, ...] = ("timed_out", "skipped")
PARENT_PID = "KVPROOF_PARENT_PID"  # in the child's environment: whom it must not outlive
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
OUT_OF_MEMORY, KILLED = "out_of_memory", "killed"
INFRASTRUCTURE = frozenset({KILLED, "not_started"})  # reason codes that say nothing about the cell: worth a retry
STDERR_TAIL_BYTES = 4096
LAST_LINE_CHARS = 300
POLL_S = 0.01
MEMORY_POLL_S = 0.1
GRACE_S = 5.0  # between SIGTERM and SIGKILL


class LocalExecutor:
    """Runs jobs on this machine, each in the folder that it is given. Threads may share one."""

    def __init__(
        self,
        command: Sequence[str] | None = None,
        grace_s: float = GRACE_S,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.grace_s, self.stopped = grace_s, stopped
        self.command = tuple(CHILD_COMMAND if command is None else command)

    def run(self, job: CellJob, folder: Path, gpu: str | None = None) -> Outcome:
        """The outcome of `job`; never raises for what the child does. Ends the child when `stopped()` turns true.

        The child sees `gpu`, the UUID of one, and no other; every GPU when that is None.
        """
        if self.stopped():
            return Outcome(status="skipped", reason_code="interrupted", reason="interrupted before it ran")
        job_path, outcome_path, stderr_path = folder / "job.json", folder / "outcome.json", folder / "stderr"
        with spool_errors():
            job_path.write_bytes(msgspec.json.encode(job))
        environment = {**os.environ, PARENT_PID: str(os.getpid())}
        if gpu is not None:
            environment[VISIBLE_GPUS] = gpu
        started, killed_before = time.monotonic(), oom_kills()
        with stderr_path.open("wb") as stderr:
            try:
                child = subprocess.Popen(
                    [*self.command, str(job_path), str(outcome_path)],
                    stdin=subprocess.DEVNULL,
                    stdout=stderr,  # the parent's stdout carries data
                    stderr=stderr,
                    start_new_session=True,
                    env=environment,
                )
            except OSError as error:
                return Outcome(status="crashed", reason_code="not_started", reason=f"the child did not start: {error}")
            note_child(folder, child.pid)
            end = self.wait(child, started + job.timeout_s, job.memory_gib)
        stderr_tail = read_tail(stderr_path)
        outcome = end or conclude(child.returncode, outcome_path, oom_kills() > killed_before)
        if outcome.status == "timed_out":
            outcome = replace(outcome, reason=f"not done after {job.timeout_s:g} s")
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

    def wait(self, child: subprocess.Popen[bytes], deadline: float, memory_gib: float | None) -> Outcome | None:
        """Wait for the child's end and leave nothing of its group alive; how it was cut short, if it was."""
        cut_short: Outcome | None = None
        look_s = 0.0
        try:
            while child.poll() is None and cut_short is None:
                now = time.monotonic()
                if self.stopped():
                    cut_short = Outcome(status="skipped", reason_code="interrupted", reason="interrupted while it ran")
                elif now >= deadline:
                    cut_short = Outcome(status="timed_out", reason_code="timeout", reason="not done in time")
                elif memory_gib is not None and now >= look_s:
                    used, look_s = resident_gib(child.pid), now + MEMORY_POLL_S
                    if used > memory_gib:
                        cut_short = crashed(OUT_OF_MEMORY, f"used {used:.2f} GiB, allowed are {memory_gib:g}")
                if cut_short is None:
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


def conclude(returncode: int, outcome_path: Path, oom_killed: bool) -> Outcome:
    """The outcome of a child that ended by itself. `oom_killed`: the kernel has killed for memory meanwhile."""
    if returncode == -signal.SIGKILL and oom_killed:
        return crashed(OUT_OF_MEMORY, "ended by SIGKILL while the kernel killed for want of memory")
    if returncode == -signal.SIGKILL:
        return crashed(KILLED, "ended by SIGKILL, which neither its parent nor the kernel's want of memory sent")
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


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory since boot, as far as it tells."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except FileNotFoundError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def resident_gib(pid: int) -> float:
    """Resident memory of process `pid` and all that it started, in GiB; 0 when it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        started = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30 + sum(resident_gib(int(other)) for other in started)
