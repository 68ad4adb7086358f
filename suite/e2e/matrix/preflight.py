"""Checks every checkpoint of a plan before anything runs: a broken one is an error of the input, not a crashed row."""

import json
import subprocess
import sys
from collections.abc import Mapping

from suite.e2e.accuracy.task import load_task
from suite.e2e.matrix.plan import Plan
from suite.errors import CheckpointError, InputError, KvproofError
from suite.models.registry import resolve_model


def check_models(plan: Plan) -> None:
    """Raise CheckpointError for the first checkpoint that would not load, InputError for too long a workload."""
    folders = sorted(
        {str(resolve_model(planned.cell.model)) for planned in plan.cells if planned.cell.family == "engine"}
    )
    if not folders:
        return
    done = subprocess.run(
        [sys.executable, "-m", "suite.models.check", *folders], capture_output=True, text=True, errors="replace"
    )
    if done.returncode == InputError.exit_code:
        raise CheckpointError(**json.loads(done.stdout))
    if done.returncode != 0:
        raise KvproofError(f"checking the checkpoints ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    check_lengths(plan, json.loads(done.stdout))


def check_lengths(plan: Plan, positions: Mapping[str, int]) -> None:
    """InputError for the first workload with a request that its model has no positions for. `positions`: by folder."""
    for cell in (planned.cell for planned in plan.cells if planned.cell.family == "engine"):
        workload, most = cell.workload, positions[str(resolve_model(cell.model))]
        tokens = {"prompt_tokens + new_tokens": workload.prompt_tokens + workload.new_tokens}
        tokens |= {f"tasks.{name}": load_task(name).longest for name in workload.tasks}
        for field, longest in tokens.items():
            if longest > most:
                expected = f"at most {most} tokens, the positions of the model {cell.model}"
                raise InputError(f"workloads.{workload.name}.{field}", longest, expected)
