"""The real models' configurations build the real geometry: parameters, layers, rows and states, without a weight."""

import json

import pytest
import torch

from suite.kernels.geometry import RunnerGeometry
from suite.models.draft_config import DraftConfig
from suite.models.dspark import BlockDraft
from suite.models.loader import build, read_config
from suite.models.mtp import DeepseekMtp
from suite.models.registry import CHECKPOINTS

CONFIGS = CHECKPOINTS.parent / "configs"


@pytest.mark.parametrize(
    ("name", "billions", "attention", "linear", "kv_bytes", "slot_bytes"),
    [
        ("deepseek-v2-lite", 15.71, 27, 0, 31_104, None),
        ("deepseek-v3", 671.03, 61, 0, 70_272, None),
        ("kimi-linear-48b-a3b", 49.12, 7, 20, 8_064, 43_417_600),
    ],
)
def test_real_geometry(name, billions, attention, linear, kv_bytes, slot_bytes):
    model = build(read_config(CONFIGS / name), torch.bfloat16, "meta")
    assert sum(map(torch.numel, model.parameters())) / 1e9 == pytest.approx(billions, abs=0.005)
    assert (len(model.attention_layers), len(model.linear_layers)) == (attention, linear)
    geometry = RunnerGeometry.from_layers(model.attention_layers, torch.bfloat16, 64)
    assert geometry.full.entry_bytes("unified") == kv_bytes
    state = model.state_geometry(torch.bfloat16)
    assert (state.slot_bytes if state else None) == slot_bytes


def test_scores_are_scaled_as_published():
    scales = [build(read_config(CONFIGS / f"deepseek-{name}"), torch.bfloat16, "meta") for name in ("v2-lite", "v3")]
    assert [round(model.attention_layers[0].scale, 4) for model in scales] == [0.1147, 0.1352]


def test_block_draft_of_qwen3_8b_is_as_large_as_the_published_one():
    values = json.loads((CONFIGS / "dspark-qwen3-8b-block7" / "config.json").read_text())
    config = DraftConfig.from_hf(values, target_depth=36)
    draft = BlockDraft(config, dtype=torch.bfloat16, device="meta")
    copies = 2 * config.vocab_size * config.hidden_size  # embedding and output projection are in the file, too
    assert 2 * (sum(map(torch.numel, draft.parameters())) + copies) / 1e9 == pytest.approx(4.74, abs=0.005)
    geometry = RunnerGeometry.from_layers(draft.attention_layers, torch.bfloat16, 64)
    assert (geometry.full.entry_bytes("static"), config.width, config.drafts) == (20_480, 7, 7)


def test_prediction_layer_of_v3_has_the_published_size():
    model = build(read_config(CONFIGS / "deepseek-v3"), torch.bfloat16, "meta")
    draft = DeepseekMtp(model.config, dtype=torch.bfloat16, device="meta")
    assert sum(map(torch.numel, draft.parameters())) / 1e9 == pytest.approx(11.6, abs=0.1)
