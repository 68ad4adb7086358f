"""Real geometry: the published configurations of the models, and weights that nobody trained."""

import json
import subprocess
import sys

import pytest
import torch

from suite.errors import UnknownNameError
from suite.kernels.geometry import RunnerGeometry
from suite.models.loader import build, load_model, read_config
from suite.models.registry import CHECKPOINTS
from suite.models.train.loop import save
from suite.models.train.minis import MINIS
from tests.model_rig import dense_logits, ragged_texts
from tests.models_independent import write_random
from tests.test_models_dense import qwen3

CONFIGS = CHECKPOINTS.parent / "configs"


@pytest.mark.parametrize(
    ("name", "billions", "full", "window", "linear", "token_bytes", "slot_bytes"),
    [
        ("gpt-oss-20b", 20.91, 12, 12, 0, 24_576, None),
        ("gpt-oss-120b", 116.83, 18, 18, 0, 36_864, None),
        ("qwen3-next-80b-a3b", 79.67, 12, 0, 36, 24_576, 77_266_944),
        ("qwen3.5-9b", 8.95, 8, 0, 24, 32_768, 51_511_296),
        ("qwen3-8b", 8.19, 36, 0, 0, 147_456, None),
    ],
)
def test_real_geometry(name, billions, full, window, linear, token_bytes, slot_bytes):
    model = build(read_config(CONFIGS / name), torch.bfloat16, "meta")
    assert sum(map(torch.numel, model.parameters())) / 1e9 == pytest.approx(billions, abs=0.005)
    windows = [layer.window for layer in model.attention_layers]
    assert (windows.count(None), windows.count(128), len(model.linear_layers)) == (full, window, linear)
    geometry = RunnerGeometry.from_layers(model.attention_layers, torch.bfloat16, 64)
    for pool in geometry.pools:
        assert pool.entry_bytes("unified") == token_bytes
    state = model.state_geometry(torch.bfloat16)
    assert (state.slot_bytes if state else None) == slot_bytes


@pytest.mark.parametrize("name", sorted(MINIS))
def test_dummy_weights_need_no_file_and_say_finite_things(tmp_path, name):
    config = MINIS[name].config
    (tmp_path / "config.json").write_text(json.dumps(dict(config)))
    first, again = (load_model(tmp_path, dtype=torch.bfloat16, device="cpu", load="dummy") for _ in range(2))
    for (held, parameter), other in zip(first.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter, other), held
        assert parameter.isfinite().all(), held
    (text,) = ragged_texts(config["vocab_size"], [70])
    logits = dense_logits(first, text)
    assert logits.isfinite().all()
    assert 0.05 < logits.std() < 20
    assert not first.training


def test_other_ways_to_load_are_refused_by_name(tmp_path):
    with pytest.raises(UnknownNameError, match="load: got 'dumy', expected one of dummy, weights"):
        load_model(tmp_path, dtype=torch.float32, device="cpu", load="dumy")


def test_what_training_saves_loads_under_the_published_names(tmp_path):
    for name, mini in MINIS.items():
        model = build(mini.config, torch.float32, "cpu")
        for at, parameter in enumerate(model.parameters()):
            parameter.fill_(at / 64)
        save(model, mini.config, tmp_path / name)
        loaded = load_model(tmp_path / name, dtype=torch.float32, device="cpu")
        for held, parameter in model.named_parameters():
            assert torch.equal(parameter.bfloat16().float(), loaded.get_parameter(held)), f"{name}: {held}"


LOADING = """
import re, sys, torch
from pathlib import Path
from suite.models.loader import build, load_model, read_config
def peak():  # of this process; getrusage's is inherited from whoever started it
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
build(read_config(Path(sys.argv[1])), torch.float32, "meta")  # imports what a model needs
before = peak()
load_model(sys.argv[1], dtype=torch.float32, device="cpu")
print(peak() - before)
"""


def test_loading_holds_one_shard_above_the_model_at_most(tmp_path):
    """Peak memory that a process grows by, mapped files included."""
    theirs = qwen3(hidden_size=512, vocab_size=16384, intermediate_size=1024, num_hidden_layers=16)
    write_random(theirs, tmp_path, shard="16MB")
    weights = sum(parameter.numel() * 4 for parameter in theirs.parameters())
    largest = max(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert largest < weights / 4
    command = [sys.executable, "-c", LOADING, str(tmp_path)]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert weights / 2 < grown <= weights + largest + 30e6
