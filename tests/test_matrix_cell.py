"""The child process: refusals and bad input are outcomes, everything else is a crash without one."""

import os
import subprocess
import sys
import types
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace

from suite.e2e.matrix import cell
from suite.errors import CheckpointError, InvariantError, RefusedError
from suite.records import Outcome
from tests.matrix_fakes import make_job, make_outcome

ROOT = Path(__file__).parents[1]


@pytest.fixture
def measure(monkeypatch):
    """Put a function in the place of the real measurement."""

    def put(function):
        module = types.ModuleType("suite.e2e.matrix.measure")
        module.measure = function
        monkeypatch.setitem(sys.modules, "suite.e2e.matrix.measure", module)

    return put


def run(tmp_path, job):
    (tmp_path / "job.json").write_bytes(msgspec.json.encode(job))
    code = cell.main([str(tmp_path / "job.json"), str(tmp_path / "outcome.json")])
    return code, msgspec.json.decode((tmp_path / "outcome.json").read_bytes(), type=Outcome)


def raising(error):
    def measure(job):
        raise error

    return measure


def test_what_was_measured_is_written(tmp_path, measure):
    measure(lambda job: make_outcome(reason=job.cell.backend))
    code, outcome = run(tmp_path, make_job())
    assert (code, outcome.status, outcome.reason) == (0, "passed", "fa3")
    assert outcome.samples == make_outcome().samples
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.json", "outcome.json"]


def test_a_refusal_is_an_outcome_with_its_environment(tmp_path, measure):
    measure(raising(RefusedError("fa3: needs sm_80 to sm_90, got cpu")))
    code, outcome = run(tmp_path, make_job())
    assert (code, outcome.status) == (0, "refused")
    assert outcome.reason == "fa3: needs sm_80 to sm_90, got cpu"
    assert outcome.provenance.python.startswith("3.")
    assert outcome.provenance.device_name
    assert not outcome.metrics


def test_bad_input_found_late_is_a_crash_with_its_field(tmp_path, measure):
    measure(raising(CheckpointError("model.norm.weight", "[3]", "shape [4]")))
    code, outcome = run(tmp_path, make_job())
    assert (code, outcome.status, outcome.reason_code) == (0, "crashed", "bad_input")
    assert "model.norm.weight" in outcome.reason


@pytest.mark.parametrize("error", [ValueError("a bug"), InvariantError("free 7 + live 24 != 32"), RuntimeError("bug")])
def test_everything_else_escapes_and_leaves_no_outcome(tmp_path, measure, error):
    measure(raising(error))
    with pytest.raises(type(error)):
        run(tmp_path, make_job())
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    ],
)
def test_want_of_memory_is_an_outcome_of_its_own(tmp_path, measure, error):
    measure(raising(error))
    code, outcome = run(tmp_path, make_job())
    assert (code, outcome.status, outcome.reason_code) == (0, "crashed", "out_of_memory")
    assert "\n" not in outcome.reason


def test_where_the_buffers_lie_is_drawn_and_kept(tmp_path, measure):
    measure(lambda job: make_outcome())
    seeds = {seed: run(tmp_path, replace(make_job(), placement_seed=seed))[1].guards.padding_bytes for seed in (1, 2)}
    assert () != seeds[1] != seeds[2] != ()
    assert run(tmp_path, replace(make_job(), placement_seed=1))[1].guards.padding_bytes == seeds[1]
    assert run(tmp_path, make_job())[1].guards.padding_bytes == ()


@pytest.mark.parametrize(("launcher", "inherited", "expected"), [("interpreter", None, "1"), ("reference", "1", None)])
def test_the_launcher_alone_decides_about_the_interpreter(
    tmp_path, measure, monkeypatch, launcher, inherited, expected
):
    monkeypatch.delenv(cell.INTERPRET, raising=False)
    if inherited:
        monkeypatch.setenv(cell.INTERPRET, inherited)
    seen = []
    measure(lambda job: seen.append(os.environ.get(cell.INTERPRET)) or make_outcome())
    run(tmp_path, make_job(launcher=launcher))
    assert seen == [expected]
    os.environ.pop(cell.INTERPRET, None)
    monkeypatch.undo()


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"cell": 3}'])
def test_a_job_that_cannot_be_read_is_one_error(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "job.json").write_bytes(content)
    assert cell.main([str(tmp_path / "job.json"), str(tmp_path / "outcome.json")]) == 4
    assert capsys.readouterr().err.startswith("error: job: got")
    assert not (tmp_path / "outcome.json").exists()


def test_a_job_with_an_unknown_field_is_refused(tmp_path, capsys):
    job = msgspec.json.decode(msgspec.json.encode(make_job()))
    job["cell"]["page_sise"] = 16
    (tmp_path / "job.json").write_bytes(msgspec.json.encode(job))
    assert cell.main([str(tmp_path / "job.json"), str(tmp_path / "outcome.json")]) == 4
    assert "page_sise" in capsys.readouterr().err


def test_as_a_module_it_exits_with_its_code(tmp_path):
    command = [sys.executable, "-m", "suite.e2e.matrix.cell"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert done.stderr.startswith("usage: ")


def test_a_half_written_outcome_is_never_there(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        cell.write_whole(tmp_path / "outcome.json", b"x" * 100)
    assert not (tmp_path / "outcome.json").exists()
