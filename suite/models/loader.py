"""Loads a Hugging Face checkpoint folder, strictly in both directions.

Every tensor in the files is used and every parameter is filled, or the load fails
by name. All headers are checked before a single weight is read; then one shard at
a time is streamed into the parameters.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from suite.errors import CheckpointError
from suite.models.registry import entry_of

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"BF16", "F16", "F32"}
MXFP4_SUFFIXES = ("_blocks", "_scales")


def load_config(folder: Path | str) -> Any:
    """The parsed config.json of `folder`: the config class of its architecture. Raises InputError by field."""
    values = _read_config(Path(folder))
    return entry_of(values).config_class().from_hf(values)


def load_model(folder: Path | str, *, dtype: torch.dtype, device: str | torch.device) -> Any:
    """The model in `folder` with its weights, in `dtype` on `device`, without gradients.

    Raises InputError for a bad config.json and CheckpointError for the first tensor or file that does not fit.
    """
    model, shards = _fit(Path(folder), dtype, device)
    parameters = dict(model.named_parameters())
    for name, tensor in _stream(shards):
        parameters[name].copy_(tensor)
    return model.eval()


def check_checkpoint(folder: Path | str) -> int:
    """Raise what `load_model` would, from config.json and the tensors' headers alone: no weight is read.

    Returns the model's positions: how many tokens a request may have.
    """
    model, _ = _fit(Path(folder), torch.float32, "meta")
    return int(model.max_positions)


@dataclass(frozen=True)
class TensorHeader:
    """What a safetensors header says of one tensor."""

    shape: tuple[int, ...]
    dtype: str


def _fit(
    folder: Path, dtype: torch.dtype, device: str | torch.device
) -> tuple[Any, dict[Path, dict[str, TensorHeader]]]:
    """The unfilled model of `folder` and the headers of its shards, which fill it exactly."""
    values = _read_config(folder)
    entry = entry_of(values)
    model = entry.model_class()(entry.config_class().from_hf(values), dtype=dtype, device=device)
    model.requires_grad_(False)
    shards = _read_headers(folder)
    _check_tensors(shards, {name: tuple(parameter.shape) for name, parameter in model.named_parameters()})
    return model, shards


def _read_config(folder: Path) -> dict[str, Any]:
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


def _check_tensors(shards: dict[Path, dict[str, TensorHeader]], shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse the first tensor, by name, that is quantised, missing, extra, wrongly shaped or not of a float dtype."""
    held = {name: header for headers in shards.values() for name, header in headers.items()}
    for name in sorted(held):
        if name.endswith(MXFP4_SUFFIXES) and name not in shapes:
            raise CheckpointError(name, f"MXFP4 {held[name].dtype}", f"unquantised experts, {name.rsplit('_', 1)[0]}")
    for name in sorted(set(shapes) - set(held)):
        raise CheckpointError(name, "missing", f"a tensor of shape {list(shapes[name])} in the checkpoint")
    for name in sorted(set(held) - set(shapes)):
        raise CheckpointError(name, f"a tensor of shape {list(held[name].shape)}", "no such tensor: the model has none")
    for name, shape in sorted(shapes.items()):
        if held[name].shape != shape:
            raise CheckpointError(name, list(held[name].shape), f"shape {list(shape)}")
        if held[name].dtype not in DTYPES:
            raise CheckpointError(name, held[name].dtype, f"one of {', '.join(sorted(DTYPES))}")


def _stream(shards: dict[Path, dict[str, TensorHeader]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor, one file open at a time."""
    for path, headers in shards.items():
        with safe_open(path, framework="pt") as file:
            for name in headers:
                yield name, file.get_tensor(name)
