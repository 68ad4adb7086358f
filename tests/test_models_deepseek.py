"""DeepSeek V2 and V3 against transformers' own implementations, absorbed and expanded."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from suite.errors import CheckpointError, InputError
from suite.models.loader import load_model
from suite.models.mla_config import DeepseekConfig
from suite.models.routed import RoutedExperts, Routing, SharedMixtureOfExperts, choose
from tests.model_rig import assert_pools_agree
from tests.models_theirs import greedy, our_logits, relative_error, said, their_logits, write_theirs

LENGTH, VOCAB = 40, 96
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LITE = {**SMALL, "q_lora_rank": None, "n_shared_experts": 2, "rope_parameters": YARN | {"mscale_all_dim": 0.707}}
V3 = {
    **SMALL,
    "q_lora_rank": 24,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "rope_parameters": YARN,
    "num_mtp_layers": 0,
}
ROUTING = Routing(
    experts=8,
    top_k=3,
    score="sigmoid",
    groups=4,
    kept_groups=2,
    group_score="best two",
    corrected=True,
    renormalise=True,
    scaling=2.5,
)
V2 = (DeepseekV2Config, DeepseekV2ForCausalLM)
V3S = (DeepseekV3Config, DeepseekV3ForCausalLM)
VARIANTS = {
    "V2-Lite": (*V2, LITE),
    "V2 with q-LoRA and limited groups": (
        *V2,
        {**LITE, "q_lora_rank": 24, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "V2 plain rope, all dense": (*V2, {**LITE, "rope_parameters": PLAIN, "first_k_dense_replace": 3}),
    "V3": (*V3S, V3),
    "V3 without groups or q-LoRA": (*V3S, {**V3, "n_group": 1, "topk_group": 1, "q_lora_rank": None}),
    "V3 halves, no renormalisation": (
        *V3S,
        {**V3, "rope_interleave": False, "norm_topk_prob": False, "first_k_dense_replace": 0},
    ),
    "V3 all experts": (*V3S, {**V3, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 8}),
}


def made(tmp_path, variant: str):
    config, model, fields = VARIANTS[variant]
    theirs = model(config(**fields, attn_implementation="eager"))
    folder = write_theirs(tmp_path, theirs)
    return theirs, load_model(folder, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_in_both_forms(tmp_path, variant):
    theirs, ours = made(tmp_path, variant)
    ids = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    exact = their_logits(theirs, ids)
    for expands in (False, True):
        assert relative_error(our_logits(ours, ids, expands_latent=expands), exact) <= 1e-4


@pytest.mark.parametrize("variant", ["V2-Lite", "V3"])
def test_bfloat16_error_is_earned(tmp_path, variant):
    """Against fp32, at most twice the error of transformers' own bf16, at the median as at the mean."""
    theirs, _ = made(tmp_path, variant)
    ids = torch.randint(VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    exact = their_logits(theirs, ids)
    rough = (their_logits(theirs.bfloat16(), ids) - exact).abs()
    ours = load_model(tmp_path, dtype=torch.bfloat16, device="cpu")
    for expands in (False, True):
        error = (our_logits(ours, ids, expands_latent=expands) - exact).abs()
        assert error.median() <= 2 * rough.median()
        assert error.mean() <= 2 * rough.mean()


@pytest.mark.parametrize("variant", ["V2-Lite", "V3"])
def test_greedy_tokens_equal_over_64_steps(tmp_path, variant):
    theirs, ours = made(tmp_path, variant)
    prompt = torch.randint(VOCAB, (1, 9), generator=torch.Generator().manual_seed(2))
    wanted = greedy(lambda ids: their_logits(theirs, ids), prompt, 64)
    assert len(set(wanted)) > 8  # a constant would be matched by accident
    assert said(lambda ids: our_logits(ours, ids), prompt, wanted) == wanted
    assert said(lambda ids: our_logits(ours, ids, expands_latent=True), prompt, wanted) == wanted


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("variant", ["V2-Lite", "V3"])
def test_pools_give_the_dense_logits(tmp_path, variant, expanded):
    _, ours = made(tmp_path, variant)
    assert_pools_agree(ours, VOCAB, expanded=expanded)


def test_experts_equal_a_loop_and_differentiate():
    random = torch.Generator().manual_seed(3)
    tokens, experts, top_k, hidden, size = 13, 6, 3, 16, 8
    block = RoutedExperts(experts, hidden, size, dtype=torch.float32, device="cpu")
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, generator=random)
    x = torch.randn(tokens, hidden, generator=random, requires_grad=True)
    chosen = torch.stack([torch.randperm(experts - 1, generator=random)[:top_k] for _ in range(tokens)])  # one idle
    weights = torch.rand(tokens, top_k, generator=random)
    out = block(x, chosen, weights)
    exact = torch.zeros_like(out)
    for token in range(tokens):
        for rank in range(top_k):
            gate, up = (block.gate_up_proj[chosen[token, rank]] @ x[token]).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            exact[token] += weights[token, rank] * (block.down_proj[chosen[token, rank]] @ inner)
    assert relative_error(out.detach(), exact.detach()) <= 1e-5
    ours, naive = (torch.autograd.grad(y.square().sum(), [x, *block.parameters()]) for y in (out, exact))
    assert all(relative_error(got, want) <= 1e-5 for got, want in zip(ours, naive, strict=True))


def test_a_tokens_experts_do_not_depend_on_its_neighbours():
    random = torch.Generator().manual_seed(4)
    block = SharedMixtureOfExperts(ROUTING, 16, 8, 8, dtype=torch.bfloat16, device="cpu").requires_grad_(False)
    for parameter in block.parameters():
        parameter.normal_(generator=random)
    x = torch.randn(9, 16, generator=random).bfloat16()
    alone = torch.cat([block(row[None]) for row in x])
    assert torch.equal(block(x), alone)


def test_groups_limit_the_choice_and_the_bias_does_not_weigh():
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.5, 0.2, 0.3, 0.7, 0.05]])
    bias = torch.zeros(8)
    chosen, weights = choose(scores, bias, ROUTING)  # groups (0.9+0.1, 0.6+0.5, 0.2+0.3, 0.7+0.05): the first two
    assert sorted(chosen[0].tolist()) == [0, 2, 3]
    assert torch.allclose(weights.sum(), torch.tensor(ROUTING.scaling))
    bias[7] = 2.0  # lifts the last group over the first, but not the weight of its expert
    chosen, weights = choose(scores, bias, ROUTING)
    assert sorted(chosen[0].tolist()) == [2, 6, 7]
    shares = torch.tensor([0.6, 0.7, 0.05]) / 1.35 * ROUTING.scaling
    assert torch.allclose(weights[0][chosen[0].argsort()], shares)


def test_published_rope_is_read_as_transformers_is(tmp_path):
    made(tmp_path, "V2-Lite")
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    new = DeepseekConfig.from_hf(values)
    published = {k: v for k, v in values.pop("rope_parameters").items() if k not in ("rope_theta", "rope_type")}
    values |= {"rope_theta": 10000.0, "rope_scaling": published | {"type": "yarn"}}
    assert DeepseekConfig.from_hf(values) == new
    assert new.attention.scale == pytest.approx(24**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    assert DeepseekConfig.from_hf(values | {"rope_scaling": None}).rope.factor == 1.0


def test_tensors_of_the_draft_layer_are_left_to_the_draft(tmp_path):
    _, ours = made(tmp_path, "V3")
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"num_nextn_predict_layers": 1}))
    held = load_file(tmp_path / "model.safetensors")
    save_file(held | {"model.layers.3.eh_proj.weight": torch.ones(48, 96)}, tmp_path / "model.safetensors")
    again = load_model(tmp_path, dtype=torch.float32, device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))
    for layer in (4, 30):
        save_file(held | {f"model.layers.{layer}.eh_proj.weight": torch.ones(48, 96)}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=rf"model\.layers\.{layer}\.eh_proj\.weight: got"):
            load_model(tmp_path, dtype=torch.float32, device="cpu")


def test_a_missing_expert_is_named(tmp_path):
    made(tmp_path, "V3")
    held = load_file(tmp_path / "model.safetensors")
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    held.pop(name)
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name}: got 'missing', expected a tensor of shape .24, 48."):
        load_model(tmp_path, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_lora_rank", 0),
        ("kv_lora_rank", ...),
        ("q_lora_rank", "24"),
        ("qk_rope_head_dim", 7),
        ("num_key_value_heads", 2),
        ("n_group", 3),
        ("topk_group", 5),
        ("num_experts_per_tok", 5),
        ("n_shared_experts", 0),
        ("first_k_dense_replace", -1),
        ("first_k_dense_replace", True),
        ("routed_scaling_factor", "2.5"),
        ("scoring_func", "softmax"),
        ("norm_topk_prob", 1),
        ("rope_interleave", None),
        ("attention_bias", True),
        ("tie_word_embeddings", True),
        ("moe_layer_freq", 2),
        ("model_type", "deepseek_v4"),
        ("kv_lora_rang", 32),
        ("rope_parameters.rope_type", "linear"),
        ("rope_parameters.mscale", 0.0),
        ("rope_parameters.beta_medium", 3),
    ],
)
def test_bad_config_field_is_named_with_its_value(tmp_path, field, value):
    values = json.loads(
        json.dumps({**V3, "model_type": "deepseek_v3", "rms_norm_eps": 1e-6, "routed_scaling_factor": 2.5})
    )
    values.pop("num_mtp_layers")
    DeepseekConfig.from_hf(values)
    at, *rest = field.split(".")
    inner = values[at] if rest else values
    inner[rest[0] if rest else at] = value
    if value is ...:
        del inner[at]
    with pytest.raises(InputError) as caught:
        DeepseekConfig.from_hf(values)
    assert str(caught.value).startswith(f"{field}: got ")
