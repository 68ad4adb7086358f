"""Linear attention: the families by name, loaded when asked for: listing them loads neither torch nor triton."""

import importlib
from typing import TYPE_CHECKING

from suite.errors import UnknownNameError

if TYPE_CHECKING:
    from suite.kernels.linear.base import LinearBackend

LINEAR_BACKENDS: dict[str, str] = {
    "gdn": "suite.kernels.linear.gdn:GdnBackend",
    "kda": "suite.kernels.linear.kda:KdaBackend",
    "lightning": "suite.kernels.linear.lightning:LightningBackend",
    "ascend_gdn": "suite.kernels.linear.ascend_gdn:AscendGdnBackend",
}


def linear_backend_class(name: str) -> "type[LinearBackend]":
    """The class registered as `name`; UnknownNameError otherwise."""
    if name not in LINEAR_BACKENDS:
        raise UnknownNameError("linear_backend", name, LINEAR_BACKENDS)
    module, _, cls = LINEAR_BACKENDS[name].partition(":")
    found: type[LinearBackend] = getattr(importlib.import_module(module), cls)
    return found
