"""Kimi-Linear against transformers' own implementation."""

import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import KimiLinearConfig as TheirConfig
from transformers import KimiLinearForCausalLM

from suite.errors import InputError
from suite.models.kimi_config import KimiLinearConfig
from suite.models.loader import load_model
from tests.model_rig import assert_pools_agree
from tests.models_theirs import greedy, our_logits, relative_error, said, their_logits, write_theirs

LENGTH, VOCAB = 150, 96  # more than two chunks of 64
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "linear_head_dim": 16,
    "linear_num_heads": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
VARIANTS = {
    "as Kimi": {},
    "q-LoRA, groups, a dense layer late": {
        "q_lora_rank": 24,
        "n_group": 4,
        "topk_group": 2,
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        "norm_topk_prob": False,
    },
    "kernel of 2, attention first and last": {
        "linear_conv_kernel_dim": 2,
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
    },
}


def made(tmp_path, variant: str = "as Kimi"):
    theirs = KimiLinearForCausalLM(TheirConfig(**(SMALL | VARIANTS[variant]), attn_implementation="eager"))
    folder = write_theirs(tmp_path, theirs)
    # transformers writes the dense MLPs under the experts' name, the published checkpoint does not
    dense = re.compile(r"block_sparse_moe\.((gate|up|down)_proj)")
    held = {dense.sub(r"mlp.\1", name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(held, folder / "model.safetensors")
    return theirs, load_model(folder, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_in_both_forms(tmp_path, variant):
    theirs, ours = made(tmp_path, variant)
    ids = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    exact = their_logits(theirs, ids)
    for expands in (False, True):
        assert relative_error(our_logits(ours, ids, expands_latent=expands), exact) <= 1e-4


def test_bfloat16_error_is_earned(tmp_path):
    """Against fp32, at most twice the error of transformers' own bf16, at the median as at the mean."""
    theirs, _ = made(tmp_path)
    ids = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    exact = their_logits(theirs, ids)
    rough = (their_logits(theirs.bfloat16(), ids) - exact).abs()
    ours = load_model(tmp_path, dtype=torch.bfloat16, device="cpu")
    error = (our_logits(ours, ids) - exact).abs()
    assert error.median() <= 2 * rough.median()
    assert error.mean() <= 2 * rough.mean()


def test_greedy_tokens_equal_over_64_steps(tmp_path):
    theirs, ours = made(tmp_path)
    prompt = torch.randint(VOCAB, (1, 9), generator=torch.Generator().manual_seed(2))
    wanted = greedy(lambda ids: their_logits(theirs, ids), prompt, 64)
    assert len(set(wanted)) > 8  # a constant would be matched by accident
    assert said(lambda ids: our_logits(ours, ids), prompt, wanted) == wanted


@pytest.mark.parametrize("expanded", [False, True])
def test_pools_give_the_dense_logits(tmp_path, expanded):
    _, ours = made(tmp_path)
    assert_pools_agree(ours, VOCAB, chunk=16, expanded=expanded)


def published(**changes) -> dict:
    """The layout of the published file: layers counted from 1, heads of the delta rule in an object of their own."""
    values = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "mla_use_nope": True,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "num_shared_experts": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.446,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "model_max_length": 1048576,
        "num_nextn_predict_layers": 0,
        "linear_attn_config": {
            "full_attn_layers": [3],
            "kda_layers": [1, 2, 4],
            "head_dim": 16,
            "num_heads": 3,
            "short_conv_kernel_size": 4,
        },
    }
    for field, value in changes.items():
        *parents, name = field.split("__")
        inner = values[parents[0]] if parents else values
        if value is ...:
            del inner[name]
        else:
            inner[name] = value
    return values


def test_published_and_transformers_configs_are_one(tmp_path):
    made(tmp_path)
    theirs = KimiLinearConfig.from_hf(json.loads((tmp_path / "config.json").read_text()))
    assert KimiLinearConfig.from_hf(published()) == theirs


def test_published_names_and_shapes(tmp_path):
    _, ours = made(tmp_path)
    held = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    first = {name.removeprefix("model.layers.1.") for name in held if name.startswith("model.layers.1.")}
    for name in ("q_conv1d.weight", "A_log", "dt_bias", "f_a_proj.weight", "g_b_proj.weight", "o_norm.weight"):
        assert f"self_attn.{name}" in first
    assert {"block_sparse_moe.experts.7.w1.weight", "block_sparse_moe.gate.e_score_correction_bias"} <= first
    assert (held["model.layers.1.self_attn.A_log"], held["model.layers.1.self_attn.q_conv1d.weight"]) == (
        (1, 1, 3, 1),
        (48, 1, 4),
    )
    assert sum(map(math.prod, held.values())) == sum(parameter.numel() for parameter in ours.parameters())


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"mla_use_nope": False}, "mla_use_nope"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        ({"linear_attn_config__full_attn_layers": [3, 5]}, "linear_attn_config.full_attn_layers, kda_layers"),
        ({"linear_attn_config__kda_layers": [1, 2]}, "linear_attn_config.full_attn_layers, kda_layers"),
        ({"linear_attn_config__kda_layers": [1, 2, 3]}, "linear_attn_config.full_attn_layers, kda_layers"),
        ({"linear_attn_config__num_heads": 0}, "linear_attn_config.num_heads"),
        ({"linear_attn_config__heads": 2}, "linear_attn_config.heads"),
        ({"linear_attn_config": ...}, "linear_num_heads"),
        ({"first_k_dense_replace": ...}, "first_k_dense_replace"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types"),
        ({"mlp_layer_types": ["dense", "sparse", "moe", "moe"]}, "mlp_layer_types"),
        ({"num_experts_per_token": 9}, "num_experts_per_token"),
        ({"num_expert_group": 3}, "num_expert_group"),
        ({"routed_scaling_factor": None}, "routed_scaling_factor"),
        ({"model_max_length": 0}, "model_max_length"),
        ({"hiden_size": 48}, "hiden_size"),
    ],
)
def test_bad_config_field_is_named_with_its_value(changes, field):
    with pytest.raises(InputError) as caught:
        KimiLinearConfig.from_hf(published(**changes))
    assert str(caught.value).startswith(f"{field}: got ")
