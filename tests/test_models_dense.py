"""Dense Qwen3 and Llama against transformers' own implementations, dense and through pools."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from suite.errors import InputError
from suite.models.dense_config import DenseConfig
from suite.models.loader import load_model
from tests.model_rig import dense_logits, ragged_texts, relative_error
from tests.models_independent import assert_agrees, write_random

VOCAB = 96
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
}


def qwen3(**fields):
    return Qwen3ForCausalLM(Qwen3Config(**TINY | {"head_dim": 32} | fields))


def llama(**fields):
    return LlamaForCausalLM(LlamaConfig(**TINY | fields))


@pytest.mark.parametrize("make", [qwen3, llama], ids=lambda make: make.__name__)
def test_logits_and_greedy_words_agree(tmp_path, make):
    model = assert_agrees(write_random(make(), tmp_path), tmp_path, VOCAB)
    assert (model.linear_family, model.linear_layers, model.state_geometry(torch.float32)) == (None, [], None)
    assert (model.max_positions, model.hidden_size) == (512, 64)


VARIANTS = {
    "tied": (qwen3, {"tie_word_embeddings": True}),
    "tied llama": (llama, {"tie_word_embeddings": True}),
    "one kv head": (llama, {"num_key_value_heads": 1}),
    "all kv heads": (qwen3, {"num_key_value_heads": 4}),
    "fast rope": (llama, {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
}


@pytest.mark.parametrize(("make", "fields"), VARIANTS.values(), ids=VARIANTS.keys())
def test_variants_agree(tmp_path, make, fields):
    assert_agrees(write_random(make(**fields), tmp_path), tmp_path, VOCAB, pools=False)


@pytest.mark.parametrize("name", ["q_norm.weight", "k_norm.weight", "model.norm.weight", "layernorm.weight"])
def test_every_small_parameter_matters(tmp_path, name):
    write_random(qwen3(), tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, device="cpu")
    (text,) = ragged_texts(VOCAB, [40])
    before = dense_logits(model, text)
    for held, parameter in model.named_parameters():
        if held.endswith(name):
            parameter.add_(torch.linspace(0, 1, len(parameter)))
    assert relative_error(dense_logits(model, text), before) > 1e-3


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (qwen3, "num_attention_heads", 3),
        (qwen3, "head_dim", 31),
        (qwen3, "layer_types", ["sliding_attention", "full_attention"]),
        (qwen3, "use_sliding_window", True),
        (qwen3, "model_type", "qwen4"),
        (llama, "mlp_bias", True),
        (llama, "attention_bias", True),
        (llama, "hidden_act", "gelu"),
        (llama, "tie_word_embeddings", 1),
        (llama, "unheard_of", 1),
        (llama, "vocab_size", "96"),
        (llama, "rope_parameters", {"rope_type": "llama3", "rope_theta": 1e4}),
    ],
)
def test_bad_config_field_is_named_with_its_value(tmp_path, make, field, value):
    write_random(make(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {field: value}
    with pytest.raises(InputError, match="got ") as caught:
        DenseConfig.from_hf(config)
    assert caught.value.field.startswith(field)
