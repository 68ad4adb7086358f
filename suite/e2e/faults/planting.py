"""Plants a fault into a built engine, by substitution at one named seam.

Production code has no branch for a fault: an engine that nothing was planted into runs the code as
it stands.
"""

from collections.abc import Callable

import torch

from suite.e2e.engine.engine import Engine
from suite.e2e.faults import FAULTS
from suite.errors import UnknownNameError
from suite.kernels.ids import KVKind


def _read_skips_translation(engine: Engine) -> None:
    """Seam `KVIndexTranslator.read_map`: reads take virtual ids for kernel ids; writes stay right."""

    def identity(kind: KVKind) -> tuple[torch.Tensor | None, int]:
        return None, 1

    engine.translator.read_map = identity  # type: ignore[method-assign]


PLANTERS: dict[str, Callable[[Engine], None]] = {
    "read_skips_translation": _read_skips_translation,
}


def plant(name: str, engine: Engine) -> None:
    """Plant fault `name` into `engine`; UnknownNameError when there is none of that name."""
    if name not in PLANTERS:
        raise UnknownNameError("plant", name, FAULTS)
    PLANTERS[name](engine)
