"""The id spaces, as types.

*virtual id*: what the scheduler and `req_to_token` hold; never changes while its token lives.
*physical page*: where the page sits in the pool now; compaction changes it.
*kernel id*: what a kernel indexes a layer's view with,
`(physical_page * page_multiplier) * page_size + offset`.

All three are small integers of one range, so a forgotten or repeated translation
reads somebody else's row instead of crashing. The wrappers below make such a
mix-up a `TypeError` at the call and a mypy error before it. Only the translator
turns the first into the second.
"""

import enum
from dataclasses import dataclass

import torch


class KVKind(enum.StrEnum):
    """Which sub-pool an id belongs to. A window id in a full pool reads a wrong row as silently as any other."""

    FULL = "full"
    WINDOW = "window"


@dataclass(frozen=True, slots=True, eq=False)
class VirtualIds:
    """Virtual token slots, int64, any shape. Meaningless to a kernel."""

    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class KernelIds:
    """Token slots of one sub-pool as its kernels index them, int64, any shape. 0 is the sink."""

    tensor: torch.Tensor
    kind: KVKind


@dataclass(frozen=True, slots=True, eq=False)
class PhysicalIds:
    """Token slots counted in physical pages of one sub-pool, int64: what a hand-off plane copies bytes by."""

    tensor: torch.Tensor
    kind: KVKind


def require_virtual(ids: object, where: str) -> torch.Tensor:
    """The tensor of `VirtualIds`; TypeError for anything else."""
    if not isinstance(ids, VirtualIds):
        raise TypeError(f"{where}: needs VirtualIds, got {type(ids).__name__}")
    return ids.tensor


def require_kernel(ids: object, kind: KVKind, where: str) -> torch.Tensor:
    """The tensor of `KernelIds` of sub-pool `kind`; TypeError for anything else."""
    if not isinstance(ids, KernelIds):
        raise TypeError(f"{where}: needs KernelIds, got {type(ids).__name__}")
    if ids.kind is not kind:
        raise TypeError(f"{where}: needs KernelIds of the {kind} pool, got ids of the {ids.kind} pool")
    return ids.tensor
