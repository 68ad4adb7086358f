"""The one contract of the KV pools: per-layer views that kernels index with kernel ids.

A pool owns bytes and views. Which page belongs to whom is the allocator's business, and what
a virtual id means the translator's. Row 0 of every view is the sink, where padding and masked
writes go; page 0 is never handed out.
"""

import abc
from typing import TYPE_CHECKING, ClassVar

import torch

from suite.kernels.geometry import RunnerGeometry
from suite.kernels.ids import KernelIds, KVKind, require_kernel
from suite.kernels.ops.write_kv import write_kv
from suite.records import PoolMode

if TYPE_CHECKING:
    from suite.kernels.pools.state import StatePool

POISON = 0x7FFF  # two fp8 NaNs, a bf16 NaN, or half an fp32 NaN


class KVPool(abc.ABC):
    """Per-layer K and V views over the pool's bytes.

    With `poison` everything but the sink starts, and every freed page ends, as NaN: a read of a row
    that nobody wrote shows in the first logits instead of in somebody's answer.
    """

    mode: ClassVar[PoolMode]
    state: "StatePool | None" = None  # of a hybrid model
    draft: "KVPool | None" = None  # rows of a draft that lie in these pages and are read through their page map

    def __init__(self, geometry: RunnerGeometry, device: torch.device, poison: bool) -> None:
        self.geometry, self.device, self.poison = geometry, device, poison
        self._k: dict[int, torch.Tensor] = {}
        self._v: dict[int, torch.Tensor] = {}

    def k_view(self, layer: int) -> torch.Tensor:
        """Keys of `layer`: [rows, kv_heads, head_dim], never moved or resized. Only rows may be strided."""
        return self._k[layer]

    def v_view(self, layer: int) -> torch.Tensor:
        """Values of `layer`, as `k_view`; of an MLA layer, the head of its latent rows."""
        return self._v[layer]

    def latent_view(self, layer: int) -> torch.Tensor:
        """Latent rows of an MLA layer: [rows, head_dim], [latent | rotary key]."""
        if not self.geometry.of(self.geometry.kind_of(layer)).is_latent:
            raise TypeError(f"layer {layer} has K and V rows, no latent ones")
        return self._k[layer][:, 0]

    def scales(self, layer: int) -> tuple[float, float]:
        """(K, V): what stored rows of `layer` are multiplied by when read; 1.0 but for fp8 rows."""
        return self.geometry.of(self.geometry.kind_of(layer)).scales_of(layer)

    def paged(self, view: torch.Tensor) -> torch.Tensor:
        """A layer's view as [pages, page_size, kv_heads, head_dim], by explicit strides.

        A reshape would invent a stride for the page dimension where page_size is 1.
        """
        size, (row, head, element) = self.geometry.page_size, view.stride()
        shape = (view.shape[0] // size, size, *view.shape[1:])
        return view.as_strided(shape, (size * row, row, head, element))

    def write(self, layer: int, ids: KernelIds, k: torch.Tensor, v: torch.Tensor | None) -> None:
        """Store k, v [tokens, kv_heads, head_dim] at kernel ids [tokens]; TypeError for ids of another space.

        v is None for MLA, whose rows k [tokens, 1, head_dim] hold both. Into fp8 rows goes the row divided by its
        scale, see `write_kv`.
        """
        rows = require_kernel(ids, self.geometry.kind_of(layer), f"write to layer {layer}")
        if (v is None) != self.geometry.of(ids.kind).is_latent:
            raise TypeError(f"write to layer {layer}: {'needs' if v is None else 'has no'} V rows")
        write_kv(self._k[layer], None if v is None else self._v[layer], rows, k, v, *self.scales(layer))

    @abc.abstractmethod
    def num_pages(self, kind: KVKind) -> int:
        """Physical pages of sub-pool `kind`, the sink included."""

    @abc.abstractmethod
    def page_multiplier(self, kind: KVKind) -> int:
        """Row blocks per page of sub-pool `kind`: 1 where kernel ids are physical ids."""

    def page_bytes(self, kind: KVKind) -> int:
        """Bytes that one page of sub-pool `kind` binds."""
        return self.geometry.page_bytes(kind, self.mode)

    @abc.abstractmethod
    def zero_pages(self, kind: KVKind, physical_pages: torch.Tensor) -> None:
        """Clear freshly bound pages: kernels multiply masked rows by 0, and 0 * NaN is NaN."""

    @abc.abstractmethod
    def poison_pages(self, kind: KVKind, physical_pages: torch.Tensor) -> None:
        """Fill freed pages with NaN; does nothing unless the pool is poisoned."""
