"""The Lightning hybrid against a naive model written here: token by token, from the formulas alone."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from suite.errors import InputError
from suite.models.lightning_hybrid import LightningHybrid, LightningHybridConfig
from suite.models.loader import build, load_model
from tests.model_rig import ModelRig, assert_pools_agree, dense_logits, ragged_texts, relative_error

CONFIG = {
    "architectures": ["BailingMoeLinearForCausalLM"],
    "model_type": "bailing_moe_linear",
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "layer_group_size": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "group_norm_size": 2,
    "intermediate_size": 40,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of random weights under the names that the model publishes."""
    path, random = tmp_path_factory.mktemp("lightning"), torch.Generator().manual_seed(0)
    model = build(CONFIG, torch.float32, "meta")
    weights = {}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=random)
        weights[name] = 1 + 0.3 * noise if parameter.ndim == 1 else noise * parameter.shape[1] ** -0.5
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def normed(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]).sqrt() * weight


def turned(x, position):
    """The first half of a head's elements, pair (i, i + 4) by position * theta^(-i / 4)."""
    out = x.clone()
    for i in range(4):
        angle = position * CONFIG["rope_theta"] ** (-i / 4)
        a, b = x[..., i], x[..., i + 4]
        out[..., i] = a * math.cos(angle) - b * math.sin(angle)
        out[..., i + 4] = b * math.cos(angle) + a * math.sin(angle)
    return out


# 2^(-8/4 k) for the four heads of the power of two below 6, then every other one of eight heads
SLOPES = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]


def naive(weights, text):
    """fp64 logits [tokens, vocab]."""
    held = {name: weight.double() for name, weight in weights.items()}
    stored = {layer: [] for layer in range(4)}
    states = {layer: torch.zeros(6, 16, 16, dtype=torch.float64) for layer in range(4)}
    logits = []
    for position, token in enumerate(text):
        x = held["model.embed_tokens.weight"][token]
        for layer in range(4):
            at = {
                name.removeprefix(f"model.layers.{layer}."): weight
                for name, weight in held.items()
                if name.startswith(f"model.layers.{layer}.")
            }
            attends = layer % 2 == 1
            kv_heads = 2 if attends else 6
            h = normed(x, at["input_layernorm.weight"])
            qkv = (at["attention.query_key_value.weight"] @ h).view(-1, 16)
            q, k, v = qkv.split([6, kv_heads, kv_heads])
            q = turned(normed(q, at["attention.query_layernorm.weight"]), position)
            k = turned(normed(k, at["attention.key_layernorm.weight"]), position)
            out = torch.zeros(6, 16, dtype=torch.float64)
            if attends:
                stored[layer].append((k, v))
                for head in range(6):
                    scores = torch.stack([keys[head // 3] @ q[head] for keys, _ in stored[layer]]) / 4
                    pairs = zip(scores.softmax(0), stored[layer], strict=True)
                    out[head] = sum(share * values[head // 3] for share, (_, values) in pairs)
                mixed = out.flatten()
            else:
                for head in range(6):
                    rate = SLOPES[head] * (1 - layer / 3 + 1e-5)
                    states[layer][head] = states[layer][head] * math.exp(-rate) + torch.outer(v[head], k[head])
                    out[head] = states[layer][head] @ q[head] / 4
                grouped = out.view(2, 48)
                grouped = grouped / (grouped.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]).sqrt()
                gate = (at["attention.g_proj.weight"] @ h).sigmoid()
                mixed = grouped.flatten() * at["attention.g_norm.weight"] * gate
            x = x + at["attention.dense.weight"] @ mixed
            h = normed(x, at["post_attention_layernorm.weight"])
            gate, up = at["mlp.gate_proj.weight"] @ h, at["mlp.up_proj.weight"] @ h
            x = x + at["mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
        logits.append(held["lm_head.weight"] @ normed(x, held["model.norm.weight"]))
    return torch.stack(logits)


def test_logits_are_the_naive_ones_dense_and_through_pools(folder):
    model = load_model(folder, dtype=torch.float32, device="cpu")
    (text,) = ragged_texts(96, [70])
    exact = naive(dict(model.named_parameters()), text)
    assert relative_error(dense_logits(model, text), exact) <= 1e-4
    (logits,) = ModelRig(model, "unified", requests=2).run([text], [40], 8)
    assert relative_error(logits, exact) <= 1e-4
    assert torch.equal(logits.argmax(-1), exact.argmax(-1))
    assert_pools_agree(model, 96)


def test_state_geometry_has_no_convolution(folder):
    model = load_model(folder, dtype=torch.bfloat16, device="cpu")
    geometry = model.state_geometry(torch.bfloat16)
    assert (model.linear_family, geometry.layers, geometry.conv_dim) == ("lightning", (0, 2), 0)
    assert geometry.temporal_shape == (6, 16, 16)
    assert [layer.index for layer in model.attention_layers] == [1, 3]


@pytest.mark.parametrize("name", ["g_norm.weight", "query_layernorm.weight", "key_layernorm.weight", "g_proj.weight"])
def test_every_small_parameter_matters(folder, name):
    model = load_model(folder, dtype=torch.float32, device="cpu")
    (text,) = ragged_texts(96, [20])
    before = dense_logits(model, text)
    for held, parameter in model.named_parameters():
        if held.endswith(name):
            parameter.mul_(torch.linspace(0.5, 1.5, parameter.shape[0]).view(-1, *[1] * (parameter.ndim - 1)))
    assert relative_error(dense_logits(model, text), before) > 1e-3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_group_size", 5),
        ("layer_group_size", 0),
        ("group_norm_size", 4),
        ("num_attention_heads", 5),
        ("use_qk_norm", False),
        ("use_qkv_bias", True),
        ("head_dim", None),
        ("unheard_of", 1),
    ],
)
def test_bad_config_field_is_named_with_its_value(field, value):
    with pytest.raises(InputError, match="got ") as caught:
        LightningHybridConfig.from_hf(CONFIG | {field: value})
    assert caught.value.field == field


def test_one_layer_decays_by_its_whole_slope():
    config = LightningHybridConfig.from_hf(CONFIG)
    rates = LightningHybrid(config, dtype=torch.float32, device="cpu").linear_layers[0].rate
    assert rates.tolist() == pytest.approx([slope * (1 + 1e-5) for slope in SLOPES])
