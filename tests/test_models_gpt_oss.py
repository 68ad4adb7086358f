"""gpt-oss against transformers' own implementation, on checkpoints that transformers writes."""

import json

import pytest
import torch
from transformers import GptOssConfig as TheirConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from suite.kernels.geometry import AttentionLayer
from suite.kernels.ids import KVKind
from suite.models.config import GptOssConfig, Rope
from suite.models.dense import DenseMixers
from suite.models.gpt_oss import GptOss
from suite.models.layers import rope_frequencies
from suite.models.loader import load_config, load_model
from tests.models_checkpoints import our_logits, their_logits, write_checkpoint

LENGTH = 40  # more than two windows of 16


def worst(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("random"))


VARIANTS = {
    "as gpt-oss": {},
    "one kv head, window 1": {"num_key_value_heads": 1, "sliding_window": 1},
    "all experts": {"num_experts_per_tok": 4},
    "one expert, full first": {
        "num_local_experts": 1,
        "num_experts_per_tok": 1,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "no window": {"layer_types": ["full_attention"] * 2},
    "tight clamp": {"swiglu_limit": 0.05, "swiglu_alpha": 3.0},
    "plain rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_agree_with_transformers(tmp_path, fields):
    """Both dtypes err at most twice as much as transformers does in bf16, scaled to the dtype, plus a floor.

    Medians over tokens, because rounding to bf16 may send a token to another expert; in fp32 no token may go there.
    """
    folder = write_checkpoint(tmp_path, **fields)
    ids = torch.randint(0, 96, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    exact = their_logits(folder, ids, torch.float32)
    theirs = (their_logits(folder, ids, torch.bfloat16) - exact).abs().amax(1)
    for dtype in (torch.float32, torch.bfloat16):
        logits = our_logits(load_model(folder, dtype=dtype, device="cpu"), ids)
        ours = (logits - exact).abs().amax(1)
        precision = torch.finfo(dtype).eps / torch.finfo(torch.bfloat16).eps
        floor = exact.abs().max() * torch.finfo(dtype).eps
        assert logits.dtype == torch.float32
        assert ours.median() <= 2 * theirs.median() * precision + floor
        if dtype == torch.float32:
            assert ours.max() <= 2 * theirs.max() * precision + floor


@pytest.mark.parametrize("name", ["sinks", "q_proj.bias", "o_proj.bias", "router.bias", "down_proj_bias"])
def test_every_small_parameter_matters(folder, name):
    """A parameter that the forward forgot would pass the comparison where the other side forgets it too."""
    model = load_model(folder, dtype=torch.float32, device="cpu")
    ids = torch.arange(LENGTH)[None]
    before = our_logits(model, ids)
    for held, parameter in model.named_parameters():
        if held.endswith(name):
            parameter.zero_()
    assert worst(our_logits(model, ids), before) > 1e-3


def test_sharded_checkpoint_loads_the_same(tmp_path, folder):
    shards = write_checkpoint(tmp_path, shard="60KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    whole = load_model(folder, dtype=torch.float32, device="cpu")
    parts = load_model(shards, dtype=torch.float32, device="cpu")
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, parts.get_parameter(name)), name


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("factor", [4.0, 32.0])
def test_yarn_frequencies_agree_with_transformers(truncate, factor):
    theirs = {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": factor,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": truncate,
    }
    config = TheirConfig(rope_parameters=theirs, max_position_embeddings=int(4096 * factor))
    expected, expected_scale = ROPE_INIT_FUNCTIONS["yarn"](config, device="cpu")
    rope = Rope(theta=150000.0, factor=factor, original_positions=4096, truncate=truncate)
    frequencies, scale = rope_frequencies(rope, 64)
    torch.testing.assert_close(frequencies, expected, rtol=4 * torch.finfo(torch.float32).eps, atol=0)
    assert scale == pytest.approx(expected_scale)


def test_attention_layers_describe_the_config(folder):
    model = load_model(folder, dtype=torch.bfloat16, device="cpu")
    first, second = model.attention_layers
    assert (first.window, first.kind, second.window, second.kind) == (16, KVKind.WINDOW, None, KVKind.FULL)
    assert (first.q_heads, first.kv_heads, first.head_dim, first.scale) == (4, 2, 32, 32**-0.5)
    for layer, attention in zip(model.attention_layers, model.model.layers, strict=True):
        assert layer.sinks.dtype == torch.float32
        assert torch.equal(layer.sinks, attention.self_attn.sinks)
        assert layer.sinks.abs().min() > 0  # filled by the loader, not left as allocated


def test_attend_sees_rotated_queries_of_the_promised_shapes(folder):
    """The pool's side of the contract: order of layers, shapes, dtype; and keys that depend on their position."""
    model = load_model(folder, dtype=torch.bfloat16, device="cpu")
    seen: list[tuple[AttentionLayer, torch.Tensor]] = []

    class Watching(DenseMixers):
        def attend(self, layer, q, k, v):
            assert q.shape == (3, 4, 32)
            assert k.shape == v.shape == (3, 2, 32)
            assert {q.dtype, k.dtype, v.dtype} == {torch.bfloat16}
            seen.append((layer, k))
            return torch.zeros_like(q)

    same = torch.tensor([5, 5, 5])
    hidden = model(same, torch.tensor([0, 1, 1]), Watching(1))
    assert hidden.shape == (3, 64)
    assert [layer.index for layer, _ in seen] == [0, 1]
    keys = seen[0][1]
    assert torch.equal(keys[1], keys[2])
    assert not torch.equal(keys[0], keys[1])


def test_equal_inputs_give_equal_bits(folder):
    model = load_model(folder, dtype=torch.bfloat16, device="cpu")
    ids = torch.randint(0, 96, (3, LENGTH))
    assert torch.equal(our_logits(model, ids), our_logits(model, ids))


def test_forward_never_asks_the_data_for_a_shape(folder):
    """On the meta device there is no data: a data-dependent shape, which a CUDA graph could not hold, raises."""
    model = GptOss(load_config(folder), dtype=torch.float32, device="meta")
    ids = torch.zeros(8, dtype=torch.int64, device="meta")
    assert model.logits(model(ids, ids, DenseMixers(2))).shape == (8, 96)


def test_config_reads_the_published_layout(folder):
    """The published files keep rope_theta beside rope_scaling; transformers writes rope_parameters. Same config."""
    values = json.loads((folder / "config.json").read_text())
    new = load_config(folder)
    rope = values.pop("rope_parameters")
    values |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "quantization_config": {}}
    assert GptOssConfig.from_hf(values) == new


@pytest.mark.gpu
def test_replayed_graph_gives_the_eager_bits(folder):
    """The whole forward and the fp32 logits of a bf16 model can be captured, and replays follow new inputs."""
    model = load_model(folder, dtype=torch.bfloat16, device="cuda")
    ids = torch.randint(0, 96, (2, LENGTH), device="cuda").flatten()
    positions = torch.arange(LENGTH, device="cuda").repeat(2)

    def run():
        return model.logits(model(ids, positions, DenseMixers(2)))

    with torch.no_grad():
        run()  # libraries allocate their workspaces outside the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        ids.copy_(torch.randint(0, 96, (2 * LENGTH,), device="cuda"))
        graph.replay()
        assert captured.dtype == torch.float32
        assert torch.equal(captured, run())
