"""The one table of who may serve what.

Names register with late-importing factories, so that listing them loads no GPU library and no torch.
"""

import importlib
from typing import TYPE_CHECKING

from suite.errors import UnknownNameError

if TYPE_CHECKING:
    from suite.kernels.attention.base import AttentionBackend

BACKENDS: dict[str, str] = {
    "reference": "suite.kernels.attention.reference:ReferenceBackend",
    "triton": "suite.kernels.attention.triton:TritonBackend",
    "fa3": "suite.kernels.attention.fa3:Fa3Backend",
}


def backend_class(name: str) -> "type[AttentionBackend]":
    """The class registered as `name`; UnknownNameError otherwise."""
    if name not in BACKENDS:
        raise UnknownNameError("backend", name, BACKENDS)
    module, _, cls = BACKENDS[name].partition(":")
    found: type[AttentionBackend] = getattr(importlib.import_module(module), cls)
    return found
