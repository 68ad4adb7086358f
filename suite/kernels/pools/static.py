"""The static pool: one tensor per layer and side, sized once; full and window layers apart.

Virtual, physical and kernel ids coincide in the full pool. The window pool is smaller, so its
pages are found through the allocator's full-to-window map.
"""

import torch

from suite.errors import InputError, PageMapRangeError
from suite.kernels.geometry import INT32_MAX, STATE, RunnerGeometry
from suite.kernels.ids import KVKind
from suite.kernels.pools import POISON, KVPool
from suite.kernels.pools.state import StatePool


class StaticPool(KVPool):
    """`pages` says how many pages each sub-pool holds, page 0 (the sink) included; `pages["state"]` counts slots.

    A draft of the geometry gets tensors of its own, as many pages of each kind, and the same ids.
    """

    mode = "static"

    def __init__(
        self, geometry: RunnerGeometry, pages: dict[str, int], device: torch.device | str, *, poison: bool = False
    ) -> None:
        super().__init__(geometry, torch.device(device), poison)
        self._pages = pages
        if geometry.state is not None:
            self.state = StatePool.static(geometry.state, pages.get(STATE, 0) - 1, device, poison=poison)
        if geometry.draft is not None:
            self.draft = StaticPool(geometry.draft, pages, device, poison=poison)
        for pool in geometry.pools:
            count = pages.get(pool.kind, 0)
            if count < 2:
                raise InputError(f"pages[{pool.kind}]", count, "at least 2: the sink and one page")
            if (rows := count * pool.page_size) > INT32_MAX:
                raise PageMapRangeError(f"{pool.kind}.kernel_ids", rows, f"at most {INT32_MAX}: page tables hold int32")
            for layer in pool.layers:
                self._k[layer] = self._rows(rows, pool.kv_heads, pool.head_dim, pool.dtype)
                if pool.is_latent:
                    self._v[layer] = self._k[layer][..., : pool.value_dim]
                else:
                    self._v[layer] = self._rows(rows, pool.kv_heads, pool.value_dim, pool.dtype)
            if poison:
                self.poison_pages(pool.kind, torch.arange(1, count, device=self.device))

    def _rows(self, rows: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(rows, heads, dim, dtype=dtype, device=self.device)

    def num_pages(self, kind: KVKind) -> int:
        return self._pages[kind]

    def page_multiplier(self, kind: KVKind) -> int:
        return 1

    def zero_pages(self, kind: KVKind, physical_pages: torch.Tensor) -> None:
        # rows of a static pool only ever hold finite K and V, unless it is poisoned
        if self.poison:
            for pages in self._paged(kind):
                pages.index_fill_(0, physical_pages, 0)

    def poison_pages(self, kind: KVKind, physical_pages: torch.Tensor) -> None:
        if self.poison:
            for pages in self._paged(kind):
                pages.view(torch.int16).index_fill_(0, physical_pages, POISON)

    def _paged(self, kind: KVKind) -> list[torch.Tensor]:
        """Every layer's rows of `kind`, the draft's among them, as bytes: [pages, page's rows]."""
        count, rows = self._pages[kind], []
        for owner in (self, self.draft):
            for pool in () if owner is None else owner.geometry.pools:
                sides = (owner._k,) if pool.is_latent else (owner._k, owner._v)
                layers = pool.layers if pool.kind is kind else ()
                rows += [side[layer].view(torch.uint8).view(count, -1) for layer in layers for side in sides]
        return rows
