"""The detection run in a child process, for whoever loads no torch: the command `faults` and the gate."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from suite.errors import KvproofError

ROOT = Path(__file__).resolve().parents[3]
COMMAND = (sys.executable, "-m", "suite.e2e.faults", "--json")
MISSED_EXIT_CODE = 1  # of the child, and of the command: a fault was missed, or a clean twin was not clean
TIMEOUT_S = 3600.0


def detection_rows(*arguments: str, timeout_s: float = TIMEOUT_S) -> list[dict[str, Any]]:
    """The rows of a detection run with these arguments; its progress goes to stderr as it comes.

    KvproofError when the child ends before its last row, or not within `timeout_s`.
    """
    try:
        done = subprocess.run([*COMMAND, *arguments], stdout=subprocess.PIPE, cwd=ROOT, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise KvproofError(f"the detection run had not ended after {timeout_s:g} s") from error
    if done.returncode not in (0, MISSED_EXIT_CODE):
        raise KvproofError(f"the detection run ended with exit code {done.returncode} before its last row")
    try:
        return [msgspec.json.decode(line) for line in done.stdout.splitlines()]
    except msgspec.DecodeError as error:
        raise KvproofError(f"the detection run wrote what is no row ({error})") from error
