"""What a checkpoint stores, and which of its tensors fills which part of a model's parameters.

Most parameters are published under their own name. A module that stores several published tensors in one
parameter (experts stacked for one grouped product, convolutions of q, k and v side by side) says so by a method
`stored_as`, and the loader writes through its views.
"""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class TensorHeader:
    """What a safetensors header says of one tensor."""

    shape: tuple[int, ...]
    dtype: str


def stored_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Published name -> the parameter, or the view of one, that it fills. Tied parameters appear once."""
    found, seen = {}, set[int]()
    for prefix, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own or seen.issuperset(map(id, own.values())):
            continue
        seen.update(map(id, own.values()))
        views = module.stored_as() if hasattr(module, "stored_as") else own
        found |= {f"{prefix}.{name}" if prefix else name: tensor for name, tensor in views.items()}
    return found
