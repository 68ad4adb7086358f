"""Checks every checkpoint of a plan before anything runs: a broken one is an error of the input, not a crashed row."""

import json
import subprocess
import sys

from suite.e2e.matrix.plan import Plan
from suite.errors import CheckpointError, InputError, KvproofError
from suite.models.registry import resolve_model


def check_models(plan: Plan) -> None:
    """Raise CheckpointError for the first checkpoint that would not load."""
    folders = sorted({str(resolve_model(planned.cell.model)) for planned in plan.cells})
    done = subprocess.run(
        [sys.executable, "-m", "suite.models.check", *folders], capture_output=True, text=True, errors="replace"
    )
    if done.returncode == InputError.exit_code:
        raise CheckpointError(**json.loads(done.stdout))
    if done.returncode != 0:
        raise KvproofError(f"checking the checkpoints ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
