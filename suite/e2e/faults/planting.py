"""Plants a fault into a built engine, by substitution at one named seam.

Production code has no branch for a fault: an engine that nothing was planted into runs the code as
it stands. Every planter names its seam, the one attribute that it replaces.
"""

from collections.abc import Callable

import torch

from suite.e2e.engine.engine import Engine
from suite.e2e.faults import FAULTS
from suite.errors import InputError, UnknownNameError
from suite.kernels.ids import KernelIds, KVKind, VirtualIds

ReadMap = tuple[torch.Tensor | None, int]
Change = Callable[[KVKind, ReadMap], ReadMap]


def _read_map(change: Change) -> Callable[[Engine], None]:
    """Seam `KVIndexTranslator.read_map`: what reads go through."""

    def planter(engine: Engine) -> None:
        own = engine.translator.read_map
        engine.translator.read_map = lambda kind: change(kind, own(kind))  # type: ignore[method-assign]

    return planter


def _twice(kind: KVKind, right: ReadMap) -> ReadMap:
    page_map, multiplier = right
    if page_map is None:
        return right
    last = page_map.numel() - 1  # the row that is unmapped forever
    again = torch.where((page_map < 0) | (page_map > last), last, page_map)
    return page_map[again], multiplier


def _window_reads_full_map(engine: Engine) -> None:
    """Seam `KVIndexTranslator.read_map`, for the window pool."""
    own = engine.translator.read_map
    engine.translator.read_map = lambda kind: own(KVKind.FULL)  # type: ignore[method-assign]


def _write_skips_translation(engine: Engine) -> None:
    """Seams `KVIndexTranslator.write_loc` and `sliding_window_write_loc_for`."""
    has_window = engine.translator.pool.geometry.window is not None

    def full(ids: VirtualIds) -> KernelIds:
        return KernelIds(ids.tensor, KVKind.FULL)

    def window(ids: VirtualIds) -> KernelIds | None:
        return KernelIds(ids.tensor, KVKind.WINDOW) if has_window else None

    engine.translator.write_loc = full  # type: ignore[method-assign]
    engine.translator.sliding_window_write_loc_for = window  # type: ignore[method-assign]


def _window_write_uses_full_ids(engine: Engine) -> None:
    """Seam `KVIndexTranslator.sliding_window_write_loc_for`."""
    rows = min(engine.translator.pool.k_view(layer).shape[0] for layer in _window_layers(engine))

    def window(ids: VirtualIds) -> KernelIds:
        full = engine.translator.write_loc(ids).tensor
        return KernelIds(torch.where(full < rows, full, 0), KVKind.WINDOW)  # in range, as the real mistake would be

    engine.translator.sliding_window_write_loc_for = window  # type: ignore[method-assign]


def _move_copies_nothing(engine: Engine) -> None:
    """Seam `UnifiedPool.move_pages`."""
    engine.allocator.pool.move_pages = lambda kind, sources, targets: None  # type: ignore[attr-defined]


def _window_layers(engine: Engine) -> tuple[int, ...]:
    window = engine.translator.pool.geometry.window
    if window is None:
        raise InputError("plant", "window_write_uses_full_ids", "a model with sliding-window layers")
    return window.layers


PLANTERS: dict[str, Callable[[Engine], None]] = {
    "read_skips_translation": _read_map(lambda kind, right: (None, 1)),
    "read_translates_twice": _read_map(_twice),
    "read_forgets_multiplier": _read_map(lambda kind, right: (right[0], 1)),
    "window_reads_full_map": _window_reads_full_map,
    "write_skips_translation": _write_skips_translation,
    "window_write_uses_full_ids": _window_write_uses_full_ids,
    "move_copies_nothing": _move_copies_nothing,
}


def plant(name: str, engine: Engine) -> None:
    """Plant fault `name` into `engine`; UnknownNameError when there is none of that name."""
    if name not in PLANTERS:
        raise UnknownNameError("plant", name, FAULTS)
    PLANTERS[name](engine)
