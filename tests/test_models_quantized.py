"""Quantised checkpoints: the arithmetic against naive formulas and transformers, the loading by name."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from suite.errors import CheckpointError, InputError
from suite.models.loader import INDEX, SINGLE, check_checkpoint, load_model
from suite.models.quantized import Quantization, dequantize_fp8, dequantize_mxfp4
from tests.models_checkpoints import write_checkpoint
from tests.models_theirs import write_theirs
from tests.test_models_deepseek import V3

EXPERTS = "model.layers.0.mlp.experts."
SQUARE = [16, 12]
FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": SQUARE}


def e2m1(nibble: int) -> float:
    """The value of four bits, as the format defines it: subnormal halves, else 2 ** (exponent - 1) * 1.mantissa."""
    sign, exponent, mantissa = nibble >> 3, nibble >> 1 & 3, nibble & 1
    size = 0.5 * mantissa if exponent == 0 else 2.0 ** (exponent - 1) * (1 + 0.5 * mantissa)
    return -size if sign else size


@settings(max_examples=30, deadline=None)
@given(data=st.lists(st.integers(0, 255), min_size=32, max_size=32), scales=st.lists(st.integers(0, 254), min_size=2))
def test_mxfp4_equals_its_definition(data, scales):
    blocks = torch.tensor(data, dtype=torch.uint8).view(1, 2, 16)
    got = dequantize_mxfp4(blocks, torch.tensor([scales[:2]], dtype=torch.uint8))[0]
    for group in range(2):
        for byte in range(16):
            for high in range(2):
                nibble = data[16 * group + byte] >> (4 * high) & 15
                exact = torch.tensor(e2m1(nibble) * 2.0 ** (scales[group] - 127), dtype=torch.float64).float()
                assert got[32 * group + 2 * byte + high] == exact


def test_mxfp4_equals_transformers_and_keeps_its_nan():
    random = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8, generator=random)
    scales = torch.randint(90, 140, (2, 6, 3), dtype=torch.uint8, generator=random)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    ours = torch.stack([dequantize_mxfp4(*expert).T for expert in zip(blocks, scales, strict=True)])
    assert torch.equal(ours, theirs)
    scales[0, 0, 1] = 255
    assert dequantize_mxfp4(blocks[0], scales[0]).isnan().sum() == 32


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), tall=st.integers(1, 5), wide=st.integers(1, 5))
def test_fp8_equals_a_loop_also_where_the_last_squares_are_cut(rows, columns, tall, wide):
    random = torch.Generator().manual_seed(rows * columns)
    weight = torch.randn(rows, columns, generator=random).to(torch.float8_e4m3fn)
    factors = torch.rand(-(-rows // tall), -(-columns // wide), generator=random)
    got = dequantize_fp8(weight, factors, (tall, wide))
    for row in range(rows):
        for column in range(columns):
            assert got[row, column] == weight[row, column].float() * factors[row // tall, column // wide]


def configure(folder, quantization) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": quantization}))


def to_mxfp4(folder, change=lambda held: None) -> dict[str, torch.Tensor]:
    """Replace the experts by random MXFP4 ones; returns what they stand for, by parameter."""
    random = torch.Generator().manual_seed(2)
    held, exact = load_file(folder / SINGLE), {}
    for name in [name for name in held if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = held.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        held[name + "_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=random)
        held[name + "_scales"] = torch.randint(118, 125, shape, dtype=torch.uint8, generator=random)
        exact[name] = convert_moe_packed_tensors(
            held[name + "_blocks"], held[name + "_scales"], dtype=torch.bfloat16
        ).contiguous()
    change(held)
    save_file(held, folder / SINGLE)
    configure(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return exact


def to_fp8(folder, change=lambda held: None) -> dict[str, torch.Tensor]:
    """Replace every matrix of a layer but the routers by a random fp8 one; returns what they stand for."""
    random = torch.Generator().manual_seed(3)
    held, exact = load_file(folder / SINGLE), {}
    for name in [name for name in held if "_proj" in name]:
        shape = held[name].shape
        held[name] = torch.randn(shape, generator=random).to(torch.float8_e4m3fn)
        squares = [-(-size // side) for size, side in zip(shape, SQUARE, strict=True)]
        factors = held[name + "_scale_inv"] = 0.05 + 0.1 * torch.rand(squares, generator=random)
        wide = factors.repeat_interleave(SQUARE[0], 0).repeat_interleave(SQUARE[1], 1)
        exact[name] = held[name].float() * wide[: shape[0], : shape[1]]
    change(held)
    save_file(held, folder / SINGLE)
    configure(folder, FP8_CONFIG)
    return exact


@pytest.fixture
def gpt_oss(tmp_path):
    return write_checkpoint(tmp_path, intermediate_size=64)


@pytest.fixture
def deepseek(tmp_path):
    return write_theirs(tmp_path, DeepseekV3ForCausalLM(DeepseekV3Config(**V3)))


def test_mxfp4_experts_load_as_what_they_stand_for(gpt_oss):
    exact = to_mxfp4(gpt_oss)
    parameters = dict(load_model(gpt_oss, dtype=torch.bfloat16, device="cpu").named_parameters())
    assert len(exact) == 4
    for name, want in exact.items():
        assert torch.equal(parameters[name], want)


def test_fp8_weights_load_as_what_they_stand_for(deepseek):
    exact = to_fp8(deepseek)
    model = load_model(deepseek, dtype=torch.float32, device="cpu")
    filled = model.checkpoint_tensors(set())
    assert len(exact) > 60
    for name, want in exact.items():
        assert torch.equal(filled[name], want), name


def test_a_scale_may_lie_in_another_shard(deepseek):
    exact = to_fp8(deepseek)
    held = load_file(deepseek / SINGLE)
    shards = {f"model-{1 + last}.safetensors": {} for last in (False, True)}
    for name, tensor in held.items():  # the factors come first
        shards[f"model-{1 + (not name.endswith('_scale_inv'))}.safetensors"][name] = tensor
    for shard, tensors in shards.items():
        save_file(tensors, deepseek / shard)
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    (deepseek / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (deepseek / SINGLE).unlink()
    filled = load_model(deepseek, dtype=torch.float32, device="cpu").checkpoint_tensors(set())
    assert all(torch.equal(filled[name], want) for name, want in exact.items())


def drop(name):
    return lambda held: held.pop(name)


def put(name, tensor):
    return lambda held: held.update({name: tensor})


Q_A = "model.layers.0.self_attn.q_a_proj.weight"  # [24, 48]: squares of 16 x 12 make [2, 4]


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("gpt_oss", drop(EXPERTS + "down_proj_scales"), EXPERTS + "down_proj_scales: got 'missing', expected a tensor"),
        ("gpt_oss", drop(EXPERTS + "down_proj_blocks"), EXPERTS + "down_proj_blocks: got 'missing', expected a tensor"),
        (
            "gpt_oss",
            put(EXPERTS + "down_proj_blocks", torch.zeros(4, 64, 1, 16, dtype=torch.uint8)),
            EXPERTS + "down_proj_blocks: got [4, 64, 1, 16], expected shape [4, 64, 2, 16]",
        ),
        (
            "gpt_oss",
            put(EXPERTS + "down_proj_scales", torch.zeros(4, 64, 3, dtype=torch.uint8)),
            EXPERTS + "down_proj_scales: got [4, 64, 3], expected shape [4, 64, 2]",
        ),
        (
            "gpt_oss",
            put(EXPERTS + "down_proj_scales", torch.zeros(4, 64, 2)),
            EXPERTS + "down_proj_scales: got 'F32', expected U8",
        ),
        (
            "gpt_oss",
            put(EXPERTS + "down_proj", torch.zeros(4, 64, 64)),
            EXPERTS + "down_proj: got 'a tensor of shape [4, 64, 64]', expected no such tensor",
        ),
        (
            "gpt_oss",
            put(EXPERTS + "down_proj_scales", torch.full((4, 64, 2), 255, dtype=torch.uint8)),
            EXPERTS + "down_proj: got 'NaN or infinite'",
        ),
        ("deepseek", drop(Q_A + "_scale_inv"), Q_A + "_scale_inv: got 'missing', expected a tensor"),
        ("deepseek", drop(Q_A), Q_A + ": got 'missing', expected a tensor of shape [24, 48]"),
        (
            "deepseek",
            put(Q_A + "_scale_inv", torch.ones(2, 5)),
            Q_A + "_scale_inv: got [2, 5], expected shape [2, 4]",
        ),
        (
            "deepseek",
            put(Q_A + "_scale_inv", torch.ones(2, 4).bfloat16()),
            Q_A + "_scale_inv: got 'BF16', expected F32",
        ),
        ("deepseek", put(Q_A, torch.ones(24, 48)), Q_A + ": got 'F32', expected F8_E4M3"),
        (
            "deepseek",
            put("model.norm.weight_scale_inv", torch.ones(1, 1)),
            "model.norm.weight: got [48], expected a matrix",
        ),
    ],
)
def test_what_does_not_fit_is_named(request, family, change, message):
    folder = request.getfixturevalue(family)
    {"gpt_oss": to_mxfp4, "deepseek": to_fp8}[family](folder, change)
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, dtype=torch.float32, device="cpu")
    assert str(caught.value).startswith(message)
    if "NaN" not in message:
        with pytest.raises(CheckpointError):  # without reading a weight
            check_checkpoint(folder)


def test_weights_that_config_does_not_declare_quantised_are_refused(deepseek):
    to_fp8(deepseek)
    configure(deepseek, None)
    with pytest.raises(CheckpointError, match="got 'F8_E4M3', expected unquantised weights"):
        load_model(deepseek, dtype=torch.float32, device="cpu")
    configure(deepseek, {"quant_method": "mxfp4"})
    with pytest.raises(CheckpointError, match="got 'F8_E4M3', expected unquantised weights"):
        load_model(deepseek, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quant_method", "gptq"),
        ("quant_method", ...),
        ("fmt", "e5m2"),
        ("weight_block_size", [128]),
        ("weight_block_size", [128, 0]),
        ("weight_block_size", 128),
        ("weight_block_size", ...),
        ("bits", 8),
    ],
)
def test_bad_quantization_config_is_named(field, value):
    values = FP8_CONFIG | {field: value}
    if value is ...:
        del values[field]
    with pytest.raises(InputError) as caught:
        Quantization.read({"quantization_config": values})
    assert str(caught.value).startswith(f"quantization_config.{field}: got ")
