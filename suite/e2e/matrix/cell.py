"""The child process: one job in, one outcome out.

`python -m suite.e2e.matrix.cell JOB.json OUTCOME.json`. Exit code 0 says that the outcome file is there,
whatever its status; 4 that the job could not be read; anything else is a crash, whose traceback is on
stderr and which leaves no outcome.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
from msgspec.structs import replace

from suite.e2e.matrix.executors import PARENT_PID
from suite.errors import InputError, RefusedError
from suite.records import CellJob, Guards, Outcome, Status

INTERPRET = "TRITON_INTERPRET"
PARENT_POLL_S = 1.0


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("usage: python -m suite.e2e.matrix.cell JOB.json OUTCOME.json", file=sys.stderr)
        return InputError.exit_code
    if PARENT_PID in os.environ:
        threading.Thread(target=outlive_nobody, args=(int(os.environ[PARENT_PID]),), daemon=True).start()
    job_path, outcome_path = map(Path, arguments)
    try:
        job = msgspec.json.decode(job_path.read_bytes(), type=CellJob)
    except (OSError, msgspec.MsgspecError) as error:
        print(f"error: {InputError('job', str(job_path), f'a readable job ({error})')}", file=sys.stderr)
        return InputError.exit_code
    started = time.monotonic()
    outcome = execute(job)
    write_whole(outcome_path, msgspec.json.encode(replace(outcome, duration_s=time.monotonic() - started)))
    return 0


def outlive_nobody(parent: int) -> None:
    """End this process and all it started once `parent` is gone: nobody would time it out or read its outcome."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def execute(job: CellJob) -> Outcome:
    """What the job came to. Refusals, bad input and want of memory are outcomes; all else is a crash."""
    set_interpreter(job)
    from suite.e2e.matrix.placement import placement

    if job.cell.family == "kernel":
        from suite.e2e.matrix.measure_kernel import measure_kernel as measure
    else:
        from suite.e2e.matrix.measure import measure

    try:
        with placement(job.cell.device, job.placement_seed) as padding:
            outcome = measure(job)
    except RefusedError as error:
        return ended(job, "refused", "refused", str(error))
    except InputError as error:
        return ended(job, "crashed", "bad_input", str(error))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return ended(job, "crashed", "out_of_memory", " ".join(str(error).split()) or "no memory left")
    return replace(outcome, guards=replace(outcome.guards or Guards(), padding_bytes=padding))


def is_out_of_memory(error: Exception) -> bool:
    """Whether `error` is CUDA's, torch's host allocator's or Python's way to say that memory is used up."""
    import torch

    host = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return host or isinstance(error, torch.OutOfMemoryError | MemoryError)


def set_interpreter(job: CellJob) -> None:
    """Triton reads this when it is first imported, so the launcher decides here and nothing else may."""
    if job.cell.launcher == "interpreter":
        os.environ[INTERPRET] = "1"
    else:
        os.environ.pop(INTERPRET, None)


def ended(job: CellJob, status: Status, reason_code: str, reason: str) -> Outcome:
    from suite.provenance import provenance

    return Outcome(status=status, reason_code=reason_code, reason=reason, provenance=provenance(job.cell.device))


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader finds all of it or no file."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
