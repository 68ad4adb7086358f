"""Prediction layers (NEXTN) against transformers' own, dense and on both pools, and what of a checkpoint is theirs."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.modeling_layers import MtpLayer

from suite.errors import CheckpointError, InputError
from suite.models.dense import DenseMixers
from suite.models.drafts import find_draft, load_draft
from suite.models.loader import load_model
from tests.model_rig import ModelRig, PoolMixers, relative_error
from tests.models_theirs import write_theirs
from tests.test_models_deepseek import V3

VOCAB, HIDDEN, LENGTH = 96, 48, 21
QWEN = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
FAMILIES = {
    "deepseek": (DeepseekV3ForCausalLM, DeepseekV3Config, V3 | {"num_mtp_layers": 1}, 3),
    "qwen": (Qwen3NextForCausalLM, Qwen3NextConfig, QWEN, 1),
}
# transformers' name -> the published one
PUBLISHED = {
    "deepseek": {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"},
    "qwen": {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"},
}
PREFIX = {"deepseek": ("model.layers.3.", ""), "qwen": ("mtp.", "layers.0.")}


def layer_of(family, theirs) -> MtpLayer:
    """A random prediction layer of transformers' own; its block is the last layer's kind."""
    base, index = theirs.model, FAMILIES[family][3]
    layer = MtpLayer(theirs.config, type(base.layers[-1]), type(base.norm), index).eval()
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
            noise = torch.randn(tensor.shape, generator=random)
            tensor.copy_(1 + 0.2 * noise if "norm" in name else 0.2 * noise)
    return layer


def published(family, layer) -> dict[str, torch.Tensor]:
    """The layer's tensors by their published names, experts apart."""
    prefix, block = PREFIX[family]
    found = {}
    for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        module, _, rest = name.partition(".")
        if module != "mtp_block":
            found[f"{prefix}{PUBLISHED[family][module]}.{rest}"] = tensor
        elif rest == "mlp.experts.gate_up_proj":
            for expert, (gate, up) in enumerate(each.chunk(2) for each in tensor):
                at = f"{prefix}{block}mlp.experts.{expert}."
                found |= {f"{at}gate_proj.weight": gate, f"{at}up_proj.weight": up}
        elif rest == "mlp.experts.down_proj":
            names = (f"{prefix}{block}mlp.experts.{expert}.down_proj.weight" for expert in range(len(tensor)))
            found |= dict(zip(names, tensor, strict=True))
        else:
            found[f"{prefix}{block}{rest}"] = tensor
    return {name: tensor.detach().clone().contiguous() for name, tensor in found.items()}


@pytest.fixture(params=FAMILIES)
def pair(request, tmp_path):
    """(theirs, their prediction layer, our target, our draft, the folder with both)."""
    model, config, fields, _ = FAMILIES[request.param]
    theirs = model(config(**fields, attn_implementation="eager")).eval()
    folder = write_theirs(tmp_path, theirs)
    values = json.loads((folder / "config.json").read_text())
    layer = layer_of(request.param, theirs)
    (folder / "config.json").write_text(json.dumps(values))
    held = load_file(folder / "model.safetensors")
    copies = {"embed_tokens.weight": torch.ones(1), "shared_head.head.weight": torch.ones(2)}
    copies = (
        {PREFIX["deepseek"][0] + name: each for name, each in copies.items()} if request.param == "deepseek" else {}
    )
    save_file(held | published(request.param, layer) | copies, folder / "model.safetensors")
    target = load_model(folder, dtype=torch.float32, device="cpu")
    draft = load_draft(find_draft(folder, "NEXTN"), target, dtype=torch.float32, device="cpu")
    return theirs, layer, target, draft, folder


@torch.no_grad()
def their_hidden(theirs, layer, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's hidden states over ids [tokens + 1] but the last, and the prediction layer's over them."""
    hidden = theirs.model(ids[None, :-1]).last_hidden_state
    positions = torch.arange(len(ids) - 1)[None]
    mask = torch.full((len(ids) - 1,) * 2, -torch.inf).triu(1)[None, None]
    turn = theirs.model.rotary_emb(hidden, positions)
    embedded = theirs.model.embed_tokens(ids[None, 1:])
    out = layer(embedded, hidden, position_embeddings=turn, attention_mask=mask, position_ids=positions, cache=None)
    return hidden[0], out[0]


def test_prediction_layer_equals_transformers(pair):
    theirs, layer, target, draft, _ = pair
    ids = torch.randint(VOCAB, (LENGTH + 1,), generator=torch.Generator().manual_seed(6))
    hidden, exact = their_hidden(theirs, layer, ids)
    positions = torch.arange(LENGTH)
    with torch.no_grad():
        ours = target(ids[:-1], positions, DenseMixers(1))
        out = draft(ids[1:], ours, positions, DenseMixers(1))
    assert relative_error(ours, hidden) <= 1e-4
    assert relative_error(out, exact) <= 1e-4
    assert relative_error(draft.logits(out), exact @ theirs.lm_head.weight.detach().T) <= 1e-4


@pytest.mark.parametrize("mode", ["static", "unified"])
def test_rows_of_the_prediction_layer_live_in_pools(pair, mode):
    """Prefilled in two chunks, then drafting on from its own output: the dense answer every time."""
    *_, draft, _ = pair
    random = torch.Generator().manual_seed(7)
    ids, hidden = torch.randint(VOCAB, (LENGTH,), generator=random), torch.randn(LENGTH, HIDDEN, generator=random)
    rig = ModelRig(draft, mode, requests=2, context=64)

    @torch.no_grad()
    def forward(new_ids, new_hidden):
        batch = rig._batch({1: new_ids.tolist()})
        mixers = PoolMixers(rig, batch, rig.backend.plan(batch), None, False)
        out = draft(batch.input_ids, new_hidden, batch.positions, mixers)
        rig.shuffle()
        return out

    got = torch.cat((forward(ids[:8], hidden[:8]), forward(ids[8:], hidden[8:])))
    for _ in range(3):
        token = draft.logits(got[-1:]).argmax(-1)
        ids, hidden = torch.cat((ids, token)), torch.cat((hidden, got[-1:]))
        got = torch.cat((got, forward(token, got[-1:])))
    with torch.no_grad():
        exact = draft(ids, hidden, torch.arange(len(ids)), DenseMixers(1))
    assert relative_error(got, exact) <= 1e-4


def test_target_and_draft_share_a_checkpoint_without_remainder(pair):
    _, _, target, draft, folder = pair
    held = set(load_file(folder / "model.safetensors"))
    sides = [set(each.checkpoint_tensors(held)) for each in (target, draft)]
    borrowed = {name for name in held if name.endswith(("layers.3.embed_tokens.weight", "shared_head.head.weight"))}
    assert sides[0] | sides[1] | borrowed == held
    assert not sides[0] & sides[1]


def test_a_missing_tensor_of_the_draft_is_named_and_the_target_still_loads(pair):
    *_, target, _, folder = pair
    held = load_file(folder / "model.safetensors")
    name = next(name for name in held if name.endswith(("eh_proj.weight", "mtp.fc.weight")))
    del held[name]
    save_file(held, folder / "model.safetensors")
    load_model(folder, dtype=torch.float32, device="cpu")
    with pytest.raises(CheckpointError, match=f"{name}: got 'missing', expected a tensor of shape .48, 96."):
        load_draft(find_draft(folder, "NEXTN"), target, dtype=torch.float32, device="cpu")


def test_layers_that_nobody_implements_are_refused(pair):
    *_, target, _, folder = pair
    values = json.loads((folder / "config.json").read_text())
    if values["model_type"] != "deepseek_v3":
        pytest.skip("only DeepSeek's config.json counts its prediction layers")
    for count in (0, 2):
        (folder / "config.json").write_text(json.dumps(values | {"num_nextn_predict_layers": count}))
        with pytest.raises(InputError, match=f"num_nextn_predict_layers: got {count}, expected 1"):
            load_draft(find_draft(folder, "NEXTN"), target, dtype=torch.float32, device="cpu")
