"""Loads a Hugging Face checkpoint folder, strictly in both directions.

Every tensor in the files is used and every parameter is filled, or the load fails
by name. All headers are checked before a single weight is read; then one shard at
a time is streamed into the parameters.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open

from suite.errors import CheckpointError, UnknownNameError
from suite.models.dummy import fill_dummy
from suite.models.hooks import resolve_shared_experts
from suite.models.quantized import Quantization, Recipe, recipes
from suite.models.registry import entry_of
from suite.models.stored import TensorHeader

Load = Literal["weights", "dummy"]
LOADS: tuple[str, ...] = get_args(Load)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def load_config(folder: Path | str) -> Any:
    """The parsed config.json of `folder`: the config class of its architecture. Raises InputError by field."""
    values = read_config(Path(folder))
    return entry_of(values).config_class().from_hf(values)


def load_model(folder: Path | str, *, dtype: torch.dtype, device: str | torch.device, load: Load = "weights") -> Any:
    """The model in `folder` with its weights, in `dtype` on `device`, without gradients.

    load: `dummy` takes the geometry of config.json, reads no other file and draws weights from a fixed seed. Raises
    InputError for a bad config.json and CheckpointError for the first tensor or file that does not fit.
    """
    if load not in LOADS:
        raise UnknownNameError("load", load, LOADS)
    values = read_config(Path(folder))
    model = build(values, dtype, device)
    return fill_dummy(model).eval() if load == "dummy" else fill(model, Path(folder), values)


def fill(model: Any, folder: Path, values: dict[str, Any]) -> Any:
    """`model` with the weights in `folder`, whose config.json holds `values`. CheckpointError for what does not fit."""
    shards, made_of = _match(model, folder, values)
    targets = model.checkpoint_tensors({name for headers in shards.values() for name in headers})
    for name, parts in _stream(shards, made_of):
        made_of[name].fill(targets[name], *parts)
        if not all(bool(end.isfinite()) for end in targets[name].aminmax()):  # NaN passes through; no copy is made
            raise CheckpointError(name, "NaN or infinite", "finite weights")
        del parts  # the last one of a shard would keep it mapped beside the next
    return model.eval()


def check_checkpoint(folder: Path | str) -> int:
    """Raise what `load_model` would, from config.json and the tensors' headers alone: no weight is read.

    Returns the model's positions: how many tokens a request may have.
    """
    values = read_config(Path(folder))
    model = build(values, torch.float32, "meta")
    _match(model, Path(folder), values)
    return int(model.max_positions)


def build(values: dict[str, Any], dtype: torch.dtype, device: str | torch.device) -> Any:
    """The unfilled model of a config.json, without gradients, stamped with what its entry class answered."""
    entry = entry_of(values)
    config, model_class = entry.config_class().from_hf(values), entry.model_class()
    shared_experts = resolve_shared_experts(model_class, config, values.get("quantization_config"))
    model = model_class(config, dtype=dtype, device=device).requires_grad_(False)
    model.shared_experts = shared_experts
    return model


def _match(
    model: Any, folder: Path, values: dict[str, Any]
) -> tuple[dict[Path, dict[str, TensorHeader]], dict[str, Recipe]]:
    """The headers of the shards in `folder`, which fill `model` exactly, and how they do."""
    shards = {
        path: {name: header for name, header in headers.items() if not model.other_runners_tensor(name)}
        for path, headers in _read_headers(folder).items()
    }
    held = {name: header for headers in shards.values() for name, header in headers.items()}
    shapes = {name: tuple(target.shape) for name, target in sorted(model.checkpoint_tensors(set(held)).items())}
    return shards, recipes(held, shapes, Quantization.read(values))


def read_config(folder: Path) -> dict[str, Any]:
    values = _read_json(folder / "config.json")
    if not isinstance(values, dict):
        raise CheckpointError(str(folder / "config.json"), values, "a JSON object")
    return values


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(str(path), "no such file", "the file to be present") from None
    except OSError as error:
        raise CheckpointError(str(path), error.strerror, "a readable file") from None
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, too many digits, too many brackets
        raise CheckpointError(str(path), str(error), "valid JSON") from None


def _read_headers(folder: Path) -> dict[Path, dict[str, TensorHeader]]:
    """Per file, the header of each tensor in it. What an index promises and its shards hold must agree."""
    if (folder / SINGLE).exists() or not (folder / INDEX).exists():
        return {folder / SINGLE: _read_header(folder / SINGLE)}
    index = folder / INDEX
    weight_map = _weight_map(index)
    shards = {folder / name: _read_header(folder / name, index) for name in sorted(set(weight_map.values()))}
    held = {name: path.name for path, header in shards.items() for name in header}
    if sum(map(len, shards.values())) > len(held):
        twice = [name for path, header in shards.items() for name in header if held[name] != path.name]
        raise CheckpointError(twice[0], "stored in two shards", "each tensor in one shard")
    for name in sorted(set(weight_map) | set(held)):
        if weight_map.get(name) != held.get(name):
            where = held.get(name, "no shard")
            raise CheckpointError(name, f"held by {where}", f"{weight_map.get(name, 'no shard')}, as {INDEX} says")
    return shards


def _weight_map(index: Path) -> dict[str, str]:
    values = _read_json(index)
    weight_map = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{INDEX}: weight_map", weight_map, "an object of tensor name to shard file")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{INDEX}: {name}", shard, "the name of a file beside the index")
    return weight_map


def _read_header(path: Path, index: Path | None = None) -> dict[str, TensorHeader]:
    if not path.is_file():
        expected = f"a shard that {index.name} names" if index else f"{SINGLE} or {INDEX} in the folder"
        raise CheckpointError(str(path), "no such file", expected)
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            return {name: TensorHeader(tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(str(path), str(error), "a complete safetensors file") from None


def _stream(
    shards: dict[Path, dict[str, TensorHeader]], made_of: dict[str, Recipe]
) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Every parameter's parts once they are all read, one file open at a time."""
    owner = {part: name for name, recipe in made_of.items() for part in recipe.parts}
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for path, headers in shards.items():
        with safe_open(path, framework="pt") as file:
            for part in headers:
                name = owner[part]
                read = waiting.setdefault(name, {})
                read[part] = file.get_tensor(part)
                if len(read) == len(made_of[name].parts):
                    yield name, [waiting[name][each] for each in made_of[name].parts]
                    del waiting[name], read
