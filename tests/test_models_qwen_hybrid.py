"""Qwen3-Next and Qwen3.5 against transformers' own implementations, dense and through pools and state slots."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from suite.errors import CheckpointError, InputError
from suite.models.dense import DenseMixers
from suite.models.hybrid_config import QwenHybridConfig
from suite.models.loader import load_config, load_model
from tests.model_rig import dense_logits, ragged_texts, relative_error
from tests.models_independent import TEXT, assert_agrees, their_logits, write_random

VOCAB = 96
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
SECTIONS = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}


def qwen3_next(**fields):
    return Qwen3NextForCausalLM(Qwen3NextConfig(**TINY | MOE | fields))


def qwen3_5(**fields):
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TINY | fields))


def qwen3_5_vision(**fields):
    text = TINY | {"rope_parameters": ROPE | SECTIONS} | fields
    tied = fields.get("tie_word_embeddings", False)
    return Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=tied)
    )


def qwen3_5_moe(**fields):
    return Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=TINY | MOE | fields, vision_config=VISION))


@pytest.mark.parametrize("make", [qwen3_next, qwen3_5_vision], ids=lambda make: make.__name__)
def test_logits_and_greedy_words_agree(tmp_path, make):
    assert_agrees(write_random(make(), tmp_path), tmp_path, VOCAB)


VARIANTS = {
    "dense": (qwen3_5, {}),
    "tied": (qwen3_5_vision, {"tie_word_embeddings": True}),
    "moe": (qwen3_5_moe, {}),
    "one key head, wide values": (qwen3_5, {"linear_num_key_heads": 1, "linear_value_head_dim": 32}),
    "as many key heads": (qwen3_next, {"linear_num_key_heads": 4}),
    "top-k not renormalised": (qwen3_next, {"norm_topk_prob": False}),
    "every second layer full": (qwen3_next, {"layer_types": ["linear_attention", "full_attention", "full_attention"]}),
    "all rotated": (qwen3_5, {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}),
    "short convolution": (qwen3_5, {"linear_conv_kernel_dim": 2}),
}


@pytest.mark.parametrize(("make", "fields"), VARIANTS.values(), ids=VARIANTS.keys())
def test_variants_agree(tmp_path, make, fields):
    assert_agrees(write_random(make(**fields), tmp_path), tmp_path, VOCAB, pools=False)


@pytest.mark.parametrize("make", [qwen3_next, qwen3_5], ids=lambda make: make.__name__)
def test_bf16_errs_as_much_as_theirs(tmp_path, make):
    """Medians over tokens: a router may send one elsewhere."""
    theirs = write_random(make(), tmp_path)
    (text,) = ragged_texts(VOCAB, [TEXT])
    exact = their_logits(theirs, [text])
    rough = (their_logits(theirs.bfloat16(), [text]) - exact).abs().amax(1)
    ours = dense_logits(load_model(tmp_path, dtype=torch.bfloat16, device="cpu"), text)
    floor = exact.abs().max() * torch.finfo(torch.bfloat16).eps
    assert (ours - exact).abs().amax(1).median() <= 2 * rough.median() + floor


PARAMETERS = [
    *("A_log", "dt_bias", "conv1d.weight", "linear_attn.norm.weight", "q_norm.weight", "k_norm.weight"),
    *("input_layernorm.weight", "model.norm.weight", "in_proj_ba.weight", "shared_expert_gate.weight", "gate.weight"),
]


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_small_parameter_matters(tmp_path, name):
    write_random(qwen3_next(), tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, device="cpu")
    (text,) = ragged_texts(VOCAB, [40])
    before = dense_logits(model, text)
    for held, parameter in model.named_parameters():
        if held.endswith(name):
            parameter.add_(0.7)
    assert relative_error(dense_logits(model, text), before) > 1e-3


def test_state_geometry_is_what_the_layers_need(tmp_path):
    write_random(qwen3_next(), tmp_path)
    model = load_model(tmp_path, dtype=torch.bfloat16, device="cpu")
    geometry = model.state_geometry(torch.bfloat16)
    assert model.linear_family == "gdn"
    assert geometry.layers == (0, 2)
    assert (geometry.conv_dim, geometry.conv_width, geometry.taps_first) == (128, 3, False)
    assert geometry.temporal_shape == (4, 16, 16)
    assert (geometry.conv_dtype, geometry.temporal_dtype) == (torch.bfloat16, torch.float32)
    assert [layer.index for layer in model.attention_layers] == [1]


def test_gradients_reach_every_parameter(tmp_path):
    """Training goes through the chunked recurrence."""
    write_random(qwen3_next(), tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, device="cpu").requires_grad_(True)
    ids = torch.tensor(ragged_texts(VOCAB, [TEXT, TEXT])).flatten()
    hidden = model(ids, torch.arange(TEXT).repeat(2), DenseMixers(2))
    torch.nn.functional.cross_entropy(model.logits(hidden), ids.roll(-1)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_sequences_of_a_dense_batch_do_not_mix(tmp_path):
    write_random(qwen3_5(), tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, device="cpu")
    texts = ragged_texts(VOCAB, [TEXT, TEXT, TEXT])
    ids = torch.tensor(texts).flatten()
    with torch.no_grad():
        together = model.logits(model(ids, torch.arange(TEXT).repeat(3), DenseMixers(3))).split(TEXT)
    for text, logits in zip(texts, together, strict=True):
        assert relative_error(logits, dense_logits(model, text)) < 1e-5


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_stacked_experts_are_read_too(tmp_path):
    """Qwen3.5 MoE is published with its experts in one tensor."""
    theirs = write_random(qwen3_5_moe(), tmp_path)

    def stack(held):
        for layer in range(3):
            at = f"model.language_model.layers.{layer}.mlp.experts."
            parts = {
                kind: [held.pop(f"{at}{e}.{kind}_proj.weight") for e in range(4)] for kind in ("gate", "up", "down")
            }
            held[at + "gate_up_proj"] = torch.cat([torch.stack(parts["gate"]), torch.stack(parts["up"])], 1)
            held[at + "down_proj"] = torch.stack(parts["down"])

    edit(tmp_path, stack)
    assert_agrees(theirs, tmp_path, VOCAB, pools=False)


def test_other_runners_tensors_are_left_to_them_and_nothing_else_is(tmp_path):
    write_random(qwen3_5_vision(), tmp_path)
    edit(tmp_path, lambda held: held.update({"mtp.fc.weight": torch.zeros(64, 128)}))
    load_model(tmp_path, dtype=torch.float32, device="cpu")
    edit(tmp_path, lambda held: held.update({"model.audio.fc.weight": torch.zeros(2, 2)}))
    with pytest.raises(CheckpointError, match=r"model\.audio\.fc\.weight"):
        load_model(tmp_path, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_types", ["linear_attention"] * 3),
        ("layer_types", ["sliding_attention"] * 3),
        ("layer_types", ["full_attention"]),
        ("linear_num_value_heads", 3),
        ("linear_conv_kernel_dim", 1),
        ("num_experts_per_tok", 5),
        ("norm_topk_prob", 1),
        ("mlp_only_layers", [0]),
        ("attn_output_gate", False),
        ("head_dim", 30),
        ("tie_word_embeddings", "no"),
        ("unheard_of", 1),
        ("rope_parameters.partial_rotary_factor", 1.5),
        ("rope_parameters.mrope_section", 11),
    ],
)
def test_bad_config_field_is_named_with_its_value(tmp_path, field, value):
    write_random(qwen3_next(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    *parents, name = field.split(".")
    place = config
    for parent in parents:
        place = place[parent]
    place[name] = value
    with pytest.raises(InputError, match="got ") as caught:
        QwenHybridConfig.from_hf(config)
    assert caught.value.field.endswith(name)


def test_vision_config_answers_tying_once(tmp_path):
    write_random(qwen3_5_vision(), tmp_path)
    assert not load_config(tmp_path).tied
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = True
    with pytest.raises(InputError, match=r"text_config\.tie_word_embeddings"):
        QwenHybridConfig.from_hf(config)
