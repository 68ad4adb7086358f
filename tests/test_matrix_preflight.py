"""A broken checkpoint is one error of the input: exit code 4, no row and no database."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from suite.e2e.matrix.plan import load_plan
from suite.e2e.matrix.preflight import check_models
from suite.errors import CheckpointError
from suite.models.registry import resolve_model

MATRIX = """
name = "preflight"
[workloads.w]
requests = 1
prompt_tokens = 8
new_tokens = 1
batch = 1
chunk_tokens = 8
[[cells]]
family = "engine"
model = "{model}"
backend = "reference"
launcher = "reference"
device = "cpu"
dtype = "float32"
page_size = 16
graph = false
seed = 1
timeout_s = 60
pool = ["static", "unified"]
workload = "w"
"""


def written(folder: Path, model: str) -> Path:
    path = folder / "matrix.toml"
    path.write_text(MATRIX.format(model=model))
    return path


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return Path(shutil.copytree(resolve_model("gpt-oss-mini"), tmp_path / "model"))


def test_a_sound_checkpoint_passes(tmp_path, checkpoint):
    check_models(load_plan(written(tmp_path, str(checkpoint))))
    check_models(load_plan(written(tmp_path, "gpt-oss-mini")))


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path, checkpoint, file):
    (checkpoint / file).unlink()
    with pytest.raises(CheckpointError, match=f"{file}: got 'no such file'"):
        check_models(load_plan(written(tmp_path, str(checkpoint))))


def test_a_truncated_checkpoint_ends_the_command_with_nothing_written(tmp_path, checkpoint):
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    matrix = written(tmp_path, str(checkpoint))
    done = subprocess.run(
        [sys.executable, "-m", "suite.cli", "run", str(matrix), "--db", str(tmp_path / "out.db")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 4
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {weights}: got ")
    assert done.stderr.endswith("expected a complete safetensors file\n")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out.db").exists()
