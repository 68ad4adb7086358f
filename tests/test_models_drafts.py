"""Block drafts against a naive fp64 implementation, on both pools; prediction layers against transformers'."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from suite.errors import CheckpointError, InputError, UnknownNameError
from suite.kernels.attention.support import backend_class
from suite.kernels.geometry import RunnerGeometry
from suite.models.dense_config import DenseConfig
from suite.models.draft_config import DraftConfig, default_target_layers
from suite.models.drafts import DRAFT_ENTRIES, find_draft, load_draft
from suite.models.qwen3 import DenseDecoder
from tests.draft_rig import DraftRig, NaiveDraft
from tests.model_rig import relative_error

VOCAB, HIDDEN, RANK, DEPTH = 61, 32, 8, 6
TARGET = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
DRAFT = TARGET | {
    "architectures": ["Qwen3DSparkModel"],
    "num_hidden_layers": 2,
    "block_size": 4,
    "mask_token_id": 60,
    "target_layer_ids": [1, 4],
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
DFLASH = {name: value for name, value in DRAFT.items() if "markov" not in name and "confidence" not in name} | {
    "architectures": ["DFlashDraftModel"]
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
VARIANTS = {
    "vanilla": {},
    "gated, blocks of 3": {"markov_head_type": "gated", "block_size": 3, "confidence_temperatures": [0.5, 1.0, 2.0]},
    "rnn, blocks of 7": {"markov_head_type": "rnn", "block_size": 7},
    "anchor dropped, confidence alone": {"sample_from_anchor": False, "confidence_head_with_markov": False},
    "windows": SLIDING,
    "causal": {"is_causal": True, "enable_confidence_head": False},
    "no head": {"markov_rank": 0, "confidence_head_with_markov": False},
}


@pytest.fixture(scope="module")
def target() -> DenseDecoder:
    random = torch.Generator().manual_seed(1)
    model = DenseDecoder(DenseConfig.from_hf(TARGET), dtype=torch.float32, device="cpu").requires_grad_(False)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=random)
        parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.3 * noise)
    return model.eval()


def published(values: dict, seed: int = 2) -> dict[str, torch.Tensor]:
    """Random tensors under the names, and of the shapes, that block drafts are published with."""
    random = torch.Generator().manual_seed(seed)
    q, kv, mlp = 4 * 16, 2 * 16, values["intermediate_size"]
    picks = len(values.get("target_layer_ids", range(values["num_hidden_layers"])))
    shapes = {"fc.weight": (HIDDEN, picks * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for layer in range(values["num_hidden_layers"]):
        for name, shape in {
            "self_attn.q_proj": (q, HIDDEN),
            "self_attn.k_proj": (kv, HIDDEN),
            "self_attn.v_proj": (kv, HIDDEN),
            "self_attn.o_proj": (HIDDEN, q),
            "self_attn.q_norm": (16,),
            "self_attn.k_norm": (16,),
            "mlp.gate_proj": (mlp, HIDDEN),
            "mlp.up_proj": (mlp, HIDDEN),
            "mlp.down_proj": (HIDDEN, mlp),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
    if rank := values.get("markov_rank"):
        shapes |= {"markov_head.markov_w1.weight": (VOCAB, rank), "markov_head.markov_w2.weight": (VOCAB, rank)}
        if values["markov_head_type"] == "gated":
            shapes |= {"markov_head.gate_proj.weight": (rank, HIDDEN + rank), "markov_head.gate_proj.bias": (rank,)}
        if values["markov_head_type"] == "rnn":
            wide = 2 * rank + HIDDEN
            shapes |= {"markov_head.joint_proj.weight": (3 * rank, wide), "markov_head.joint_proj.bias": (3 * rank,)}
    if values.get("enable_confidence_head"):
        wide = HIDDEN + (rank if rank and values.get("confidence_head_with_markov") else 0)
        shapes |= {"confidence_head.proj.weight": (1, wide), "confidence_head.proj.bias": (1,)}
    noise = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    return {name: 1 + 0.1 * each if "norm" in name else 0.3 * each for name, each in noise.items()}


def written(folder, values: dict, tensors: dict[str, torch.Tensor] | None = None):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(published(values) if tensors is None else tensors, folder / "model.safetensors")
    return folder


def loaded(folder, target, algorithm="DSPARK"):
    """The draft in `folder`, named by the user."""
    target_folder = folder / "target"
    target_folder.mkdir(exist_ok=True)
    (target_folder / "config.json").write_text(json.dumps(TARGET))
    return load_draft(find_draft(target_folder, algorithm, folder), target, dtype=torch.float32, device="cpu")


def feed(lengths: dict[int, int], picks: int = 2, seed: int = 3) -> dict[int, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {row: torch.randn(length, picks * HIDDEN, generator=random) for row, length in lengths.items()}


def assert_naive(rig: DraftRig, naive: NaiveDraft, fed: dict[int, torch.Tensor], anchors: dict[int, int]) -> None:
    proposal = rig.propose(anchors)
    for index, (row, anchor) in enumerate(anchors.items()):
        ids, logits, confidence = naive.propose(fed[row].double(), anchor)
        assert proposal.ids[index].tolist() == ids
        assert relative_error(proposal.logits[index], logits) <= 1e-4
        if confidence[0] is None:
            assert proposal.confidence is None
        else:
            assert proposal.confidence[index].tolist() == pytest.approx(confidence, rel=1e-4)


def drafted_by(folder, values, target, mode, launcher=None):
    """Feed two requests, propose, commit some of it over the block's rows, propose again: naive both times."""
    draft = loaded(written(folder, values), target, "DSPARK" if "markov_rank" in values else "DFLASH")
    config = DraftConfig.from_hf(values, target_depth=DEPTH)
    naive = NaiveDraft(published(values), config, target.model.embed_tokens.weight, target.lm_head.weight)
    rig = DraftRig(draft, mode, launcher, requests=3, context=64)
    fed = feed({1: 9, 2: 4})
    rig.inject(feed({3: 6}, seed=8))
    rig.inject({row: features[:3] for row, features in fed.items()})
    rig.inject({row: features[3:] for row, features in fed.items()})
    rig.release(3)
    rig.shuffle()
    assert_naive(rig, naive, fed, {1: 7, 2: 11})
    more = feed({1: 2, 2: 3}, seed=4)
    rig.inject(more)
    assert_naive(rig, naive, {row: torch.cat((fed[row], more[row])) for row in fed}, {1: 5, 2: 7})


@pytest.mark.parametrize("mode", ["static", "unified", "unified_token_major"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_dspark_equals_the_naive_draft(tmp_path, target, variant, mode):
    drafted_by(tmp_path, DRAFT | VARIANTS[variant], target, mode)


@pytest.mark.parametrize("changes", [{}, {"block_size": 2}, SLIDING], ids=["blocks of 4", "blocks of 2", "windows"])
def test_dflash_equals_the_naive_draft(tmp_path, target, changes):
    drafted_by(tmp_path, DFLASH | changes, target, "unified")


def test_our_triton_kernels_attend_a_block(tmp_path, target):
    drafted_by(tmp_path, DRAFT, target, "unified", "interpreter")


def test_backends_that_attend_causally_refuse_a_block_draft(tmp_path, target):
    draft = loaded(written(tmp_path, DRAFT), target)
    geometry = RunnerGeometry.from_layers(draft.attention_layers, torch.bfloat16, 64)
    for name in ("fa3", "flashinfer", "trtllm_mha", "fa4"):
        refusal = backend_class(name).refusal(geometry, "unified", "cuda", "reference", False)
        assert refusal == f"{name}: needs causal attention, got a draft's block, whose tokens all see each other"
    assert backend_class("triton").refusal(geometry, "unified", "cpu", "reference", False) is None


def test_sampling_sees_every_biased_distribution(tmp_path, target):
    """`pick` decides the next bias: a draft that picks otherwise proposes otherwise."""
    draft = loaded(written(tmp_path, DRAFT), target)
    rig = DraftRig(draft, "static", requests=2, context=64)
    rig.inject(feed({1: 6}))
    seen = []

    def pick(logits, index):
        seen.append((index, tuple(logits.shape)))
        return logits.argmin(-1)

    greedy = rig.propose({1: 7})
    draft.propose, plain = (lambda *args: plain(*args, pick)), draft.propose
    proposal = rig.propose({1: 7})
    assert seen == [(index, (1, VOCAB)) for index in range(4)]
    assert proposal.ids.tolist() == proposal.logits.argmin(-1).tolist() != greedy.ids.tolist()
    head, shift = draft.markov_head, proposal.logits[:, 1:] - greedy.logits[:, 1:]
    biases = [head.markov_w2(head.markov_w1(each.ids[:, :-1])) for each in (proposal, greedy)]
    assert shift.abs().max() > 0.1
    assert relative_error(shift, biases[0] - biases[1]) <= 1e-4


def test_features_are_the_named_layers_in_their_order(tmp_path, target):
    draft = loaded(written(tmp_path, DRAFT), target)
    streams = {layer: torch.full((3, HIDDEN), float(layer)) for layer in range(DEPTH)}
    assert draft.features(streams)[0].tolist() == [1.0] * HIDDEN + [4.0] * HIDDEN


def test_published_default_layers():
    assert default_target_layers(5, 36) == (1, 9, 17, 25, 33)
    assert default_target_layers(1, 36) == (18,)
    config = DraftConfig.from_hf({k: v for k, v in DRAFT.items() if k != "target_layer_ids"}, target_depth=DEPTH)
    assert config.target_layers == (1, 3)


@pytest.mark.parametrize(
    ("extra", "block", "mask"),
    [
        ({}, 4, 60),
        ({"dspark_config": {"block_size": 5, "mask_token_id": 50}}, 5, 50),
        ({"dflash_config": {"block_size": 5}}, 5, 60),
        ({"dflash_config": {"block_size": 5}, "dspark_block_size": 6, "dspark_noise_token_id": 40}, 6, 40),
        ({"text_config": {"block_size": 3}}, 3, 60),
    ],
)
def test_precedence_of_fields(extra, block, mask):
    config = DraftConfig.from_hf(DRAFT | extra, target_depth=DEPTH)
    assert (config.drafts, config.mask_id) == (block, mask)


def test_draft_is_found_where_it_may_lie(tmp_path):
    target, draft = tmp_path / "target", tmp_path / "draft"
    for folder, values in ((target, TARGET), (draft, DRAFT)):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match=r"draft: got None, expected a draft's folder, dspark_block_size in"):
        find_draft(target, "DSPARK")
    written(target / "dspark", DRAFT)
    assert find_draft(target, "DSPARK").folder == target / "dspark"
    (target / "config.json").write_text(json.dumps(TARGET | {"architectures": ["Qwen3DSparkModel"], **DRAFT_FIELDS}))
    assert find_draft(target, "DSPARK").bundled
    found = find_draft(target, "DSPARK", draft)
    assert (found.folder, found.bundled, found.architecture) == (draft, False, "Qwen3DSparkModel")
    with pytest.raises(UnknownNameError, match="architectures: got 'Qwen3DSparkModel'"):
        find_draft(target, "DFLASH", draft)
    with pytest.raises(UnknownNameError, match="algorithm: got 'EAGLE9'"):
        find_draft(target, "EAGLE9")


DRAFT_FIELDS = {"dspark_block_size": 4, "dspark_target_layer_ids": [1, 4]}


def test_nextn_is_the_targets_own(tmp_path):
    for name, architecture in (
        ("DeepseekV3ForCausalLM", "DeepseekV3ForCausalLMNextN"),
        ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLMMTP"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
        found = find_draft(tmp_path, "NEXTN")
        assert (found.architecture, found.bundled) == (architecture, True)
    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    with pytest.raises(UnknownNameError, match="architectures: got 'Qwen3ForCausalLM'"):
        find_draft(tmp_path, "NEXTN")


def test_copies_of_what_is_borrowed_are_left_and_prefixes_read(tmp_path, target):
    tensors = published(DRAFT)
    copies = {"embed_tokens.weight": torch.full((VOCAB, HIDDEN), torch.nan), "lm_head.weight": torch.ones(1)}
    draft = loaded(written(tmp_path, DRAFT, tensors | copies), target)
    inner = {f"model.{name}" if name.startswith(("layers.", "norm", "fc")) else name: t for name, t in tensors.items()}
    again = loaded(written(tmp_path, DRAFT, inner), target)
    assert all(torch.equal(a, b) for a, b in zip(draft.parameters(), again.parameters(), strict=True))
    assert sum(map(torch.numel, draft.parameters())) == sum(math.prod(t.shape) for t in tensors.values())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fc.weight", None, "fc.weight: got 'missing', expected a tensor of shape [32, 64]"),
        ("fc.weight", torch.ones(32, 96), "fc.weight: got [32, 96], expected shape [32, 64]"),
        ("fc.bias", torch.ones(32), "fc.bias: got 'a tensor of shape [32]', expected no such tensor"),
        ("markov_head.markov_w2.weight", None, "markov_head.markov_w2.weight: got 'missing'"),
        ("confidence_head.proj.weight", torch.ones(1, 32), "confidence_head.proj.weight: got [1, 32], expected shape"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, target, name, change, message):
    tensors = published(DRAFT)
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change
    with pytest.raises(CheckpointError) as caught:
        loaded(written(tmp_path, DRAFT, tensors), target)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("target_layer_ids", [1, 6], "target_layer_ids: got 6, expected 0 to 5: the target has 6 layers"),
        ("target_layer_ids", [1, 1], "target_layer_ids: got [1, 1], expected each layer once"),
        ("target_layer_ids", "1,4", "target_layer_ids: got '1,4'"),
        ("block_size", 0, "block_size: got 0"),
        ("mask_token_id", 61, "mask_token_id: got 61, expected a token below vocab_size (61)"),
        ("mask_token_id", None, "mask_token_id: got None"),
        ("markov_head_type", "fir", "markov_head_type: got 'fir', expected one of vanilla, gated, rnn"),
        ("markov_rank", -1, "markov_rank: got -1"),
        ("confidence_temperatures", [1.0], "confidence_temperatures: got [1.0], expected a list of block_size (4)"),
        ("is_causal", 1, "is_causal: got 1"),
        ("layer_types", ["sliding_attention"] * 2, "sliding_window: got"),
        ("num_key_value_heads", 3, "num_attention_heads: got 4"),
        ("blok_size", 4, "blok_size: got 4, expected no such field"),
        ("dflash_config", [1], "dflash_config: got [1], expected an object"),
        ("vocab_size", 62, "vocab_size, hidden_size: got (62, 32), expected (61, 32), the target's"),
    ],
)
def test_bad_fields_are_named(tmp_path, target, field, value, message):
    with pytest.raises(InputError) as caught:
        loaded(written(tmp_path, DRAFT | {field: value}, {}), target)
    assert str(caught.value).startswith(message)


def test_every_draft_entry_imports():
    for entry in DRAFT_ENTRIES.values():
        assert entry.model_class().__name__
        assert hasattr(entry.config_class(), "from_hf")


def test_dummy_weights_need_no_file(tmp_path, target):
    folder = written(tmp_path, DRAFT)
    (folder / "model.safetensors").unlink()
    (folder / "target").mkdir()
    (folder / "target" / "config.json").write_text(json.dumps(TARGET))
    found = find_draft(folder / "target", "DSPARK", folder)
    draft = load_draft(found, target, dtype=torch.float32, device="cpu", load="dummy")
    assert all(parameter.isfinite().all() for parameter in draft.parameters())
    with pytest.raises(UnknownNameError, match="load: got 'pickle'"):
        load_draft(found, target, dtype=torch.float32, device="cpu", load="pickle")
