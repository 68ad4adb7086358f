"""The loader is strict in both directions: each fault of a checkpoint is one error that names it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from suite.errors import CheckpointError, InputError, UnknownNameError
from suite.models.loader import load_config, load_model
from suite.models.registry import ENTRIES, resolve_model, shipped_models
from suite.models.tokenizer import load_tokenizer
from tests.models_checkpoints import write_checkpoint

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return {
        "single": write_checkpoint(tmp_path_factory.mktemp("single")),
        "sharded": write_checkpoint(tmp_path_factory.mktemp("sharded"), shard="60KB"),
    }


@pytest.fixture
def single(tmp_path, written) -> Path:
    return Path(shutil.copytree(written["single"], tmp_path / "single"))


@pytest.fixture
def sharded(tmp_path, written) -> Path:
    return Path(shutil.copytree(written["sharded"], tmp_path / "sharded"))


def load(folder: Path):
    return load_model(folder, dtype=torch.float32, device="cpu")


def edit_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def edit_json(path: Path, change) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def refusal(folder: Path, error=CheckpointError) -> str:
    with pytest.raises(error) as caught:
        load(folder)
    assert caught.value.exit_code == 4
    return str(caught.value)


def test_missing_tensor(single):
    edit_tensors(single, lambda held: held.pop("model.layers.1.self_attn.sinks"))
    assert refusal(single) == (
        "model.layers.1.self_attn.sinks: got 'missing', expected a tensor of shape [4] in the checkpoint"
    )


def test_extra_tensor(single):
    edit_tensors(single, lambda held: held.update({"model.layers.1.self_attn.q_norm.weight": torch.ones(32)}))
    message = refusal(single)
    assert message.startswith("model.layers.1.self_attn.q_norm.weight: got 'a tensor of shape [32]'")
    assert "no such tensor" in message


def test_wrongly_shaped_tensor(single):
    edit_tensors(single, lambda held: held.update({"lm_head.weight": torch.ones(64, 96)}))
    assert refusal(single) == "lm_head.weight: got [64, 96], expected shape [96, 64]"


def test_tensor_of_an_integer_dtype(single):
    edit_tensors(single, lambda held: held.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    assert refusal(single) == "model.norm.weight: got 'I8', expected one of BF16, F16, F32"


def test_mxfp4_experts_are_refused_by_name(single):
    def quantise(held):
        held.pop("model.layers.0.mlp.experts.down_proj")
        held["model.layers.0.mlp.experts.down_proj_blocks"] = torch.zeros(4, 64, 2, 16, dtype=torch.uint8)
        held["model.layers.0.mlp.experts.down_proj_scales"] = torch.zeros(4, 64, 2, dtype=torch.uint8)

    edit_tensors(single, quantise)
    message = refusal(single)
    assert message.startswith("model.layers.0.mlp.experts.down_proj_blocks: got 'MXFP4 U8'")
    assert message.endswith("unquantised experts, model.layers.0.mlp.experts.down_proj")


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_safetensors(single, keep):
    path = single / SINGLE
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    message = refusal(single)
    assert str(path) in message
    assert message.endswith("expected a complete safetensors file")


def test_index_names_an_absent_shard(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    assert refusal(sharded) == f"{shard}: got 'no such file', expected a shard that {INDEX} names"


def test_index_and_shards_disagree(sharded):
    first, second = sorted(path.name for path in sharded.glob("*.safetensors"))[:2]
    moved = next(name for name in load_file(sharded / first))
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update({moved: second}))
    assert refusal(sharded) == f"{moved}: got 'held by {first}', expected {second}, as {INDEX} says"


def test_shard_holds_a_tensor_the_index_does_not_name(sharded):
    edit_json(sharded / INDEX, lambda index: index["weight_map"].pop("model.norm.weight"))
    message = refusal(sharded)
    assert message.startswith("model.norm.weight: got 'held by model-")
    assert "expected no shard" in message


def test_tensor_stored_in_two_shards(sharded):
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    tensors = load_file(first)
    name = next(iter(tensors))
    save_file(load_file(second) | {name: tensors[name]}, second)
    assert refusal(sharded) == f"{name}: got 'stored in two shards', expected each tensor in one shard"


@pytest.mark.parametrize(
    "weight_map", [None, {}, [], {"lm_head.weight": "../other.safetensors"}, {"lm_head.weight": 3}]
)
def test_index_without_a_usable_weight_map(sharded, weight_map):
    edit_json(sharded / INDEX, lambda index: index.update(weight_map=weight_map))
    assert refusal(sharded).startswith(INDEX)


def test_folder_without_weights_or_config(single):
    (single / SINGLE).unlink()
    assert refusal(single) == f"{single / SINGLE}: got 'no such file', expected {SINGLE} or {INDEX} in the folder"
    (single / "config.json").unlink()
    assert refusal(single) == f"{single / 'config.json'}: got 'no such file', expected the file to be present"


@pytest.mark.parametrize("text", ["", "{", "[1]", '"gpt"', "\x00"])
def test_config_that_is_no_json_object(single, text):
    (single / "config.json").write_text(text)
    assert str(single / "config.json") in refusal(single)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", ...),
        ("hidden_size", 0),
        ("hidden_size", -64),
        ("head_dim", 31),
        ("head_dim", "64"),
        ("head_dim", True),
        ("num_attention_heads", 3),
        ("num_key_value_heads", None),
        ("num_hidden_layers", 2.0),
        ("num_experts_per_tok", 5),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["full_attention", "chunked_attention"]),
        ("sliding_window", None),
        ("rms_norm_eps", 0),
        ("swiglu_limit", float("nan")),
        ("hidden_act", "gelu"),
        ("attention_bias", False),
        ("tie_word_embeddings", True),
        ("hiden_size", 64),
        ("architectures", ["GptOssForCausaLM"]),
        ("architectures", []),
        ("architectures", ...),
        ("rope_parameters.rope_type", "longrope"),
        ("rope_parameters.factor", 0.5),
        ("rope_parameters.truncate", 1),
        ("rope_parameters.rope_theta", ...),
        ("rope_parameters.mscale", 0.7),
        ("rope_parameters", [1]),
    ],
)
def test_bad_config_field_is_named_with_its_value(single, field, value):
    def change(values):
        *parents, name = field.split(".")
        for parent in parents:
            values = values[parent]
        if value is ...:
            del values[name]
        else:
            values[name] = value

    edit_json(single / "config.json", change)
    message = refusal(single, InputError)
    assert message.startswith(f"{field}: got ")
    assert "expected " in message


def test_a_refused_checkpoint_leaves_the_files_alone(single):
    edit_tensors(single, lambda held: held.pop("lm_head.weight"))
    before = {path.name: path.read_bytes() for path in single.iterdir()}
    refusal(single)
    assert {path.name: path.read_bytes() for path in single.iterdir()} == before


def test_resolve_model(tmp_path):
    assert "gpt-oss-mini" in shipped_models()
    assert load_config(resolve_model("gpt-oss-mini")).layers == 4
    assert resolve_model(tmp_path) == tmp_path
    for unknown in ("gpt-oss-mimi", str(tmp_path / "absent"), "", "../gpt-oss-mini"):
        with pytest.raises(UnknownNameError, match="model: got"):
            resolve_model(unknown)
    with pytest.raises(UnknownNameError, match="did you mean 'gpt-oss-mini'"):
        resolve_model("gpt-oss-mimi")


def test_every_registered_entry_imports():
    for entry in ENTRIES.values():
        assert entry.model_class().__name__
        assert hasattr(entry.config_class(), "from_hf")


def test_names_are_known_without_torch():
    code = (
        "import sys; from suite.models.registry import shipped_models; shipped_models(); print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert found.stdout.strip() == "False"


def test_tokenizer_of_the_shipped_checkpoint(tmp_path):
    tokenizer = load_tokenizer(resolve_model("gpt-oss-mini"))
    text = "<bos> recall k00 v79 ? k00"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    with pytest.raises(CheckpointError, match="no such file"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"a tokenizer\.json that"):
        load_tokenizer(tmp_path)
