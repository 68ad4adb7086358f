"""The unified pools: one byte buffer that all sub-pools of a runner share.

Every sub-pool's pages are counted from byte 0 and may reach the buffer's end; only the allocator
keeps them apart, so moving the boundary rebuilds nothing. The two classes differ in how a page lays
out its rows, see `geometry.py`.
"""

from typing import ClassVar

import torch

from suite.kernels.geometry import KVGeometry, RunnerGeometry, plan_buffer
from suite.kernels.ids import KVKind
from suite.kernels.pools import POISON, KVPool
from suite.records import PoolMode


class UnifiedPool(KVPool):
    """Page-major: dense views. Raises PoolTooSmallError, PageMapRangeError or UnequalRowsError before it allocates."""

    mode: ClassVar[PoolMode] = "unified"

    def __init__(
        self,
        geometry: RunnerGeometry,
        buffer_bytes: int,
        max_request_tokens: int,
        device: torch.device | str,
        *,
        poison: bool = False,
    ) -> None:
        super().__init__(geometry, torch.device(device), poison)
        self.buffer_bytes, self.spans = plan_buffer(geometry, self.mode, buffer_bytes, max_request_tokens)
        self.sink_bytes = max(self.page_bytes(pool.kind) for pool in geometry.pools)
        # a layer's view starts at its own block, so its last page overruns the buffer by less than one page
        self._storage = torch.zeros(self.buffer_bytes + self.sink_bytes, dtype=torch.uint8, device=self.device)
        for pool in geometry.pools:
            for layer in pool.layers:
                self._k[layer] = self._view(pool, layer, pool.head_dim, after_k=False)
                if pool.is_latent:
                    self._v[layer] = self._k[layer][..., : pool.value_dim]
                else:
                    self._v[layer] = self._view(pool, layer, pool.value_dim, after_k=True)
        if poison:
            self._storage[self.sink_bytes :].view(torch.int16).fill_(POISON)

    def _view(self, pool: KVGeometry, layer: int, head_dim: int, *, after_k: bool) -> torch.Tensor:
        """Rows of one layer's K, or of its V, over the whole buffer."""
        rows = self.num_pages(pool.kind) * self.page_multiplier(pool.kind) * pool.page_size
        width = pool.kv_heads * head_dim
        first = (pool.k_block(layer) + after_k) * pool.page_size * width
        return self._strided(pool, rows, head_dim, width, first)

    def _strided(self, pool: KVGeometry, rows: int, head_dim: int, row_stride: int, first: int) -> torch.Tensor:
        typed = self._storage.view(pool.dtype)
        return typed.as_strided((rows, pool.kv_heads, head_dim), (row_stride, head_dim, 1), first)

    def num_pages(self, kind: KVKind) -> int:
        return self.spans[kind].num_pages

    def page_multiplier(self, kind: KVKind) -> int:
        return self.geometry.of(kind).blocks_per_page

    def zero_pages(self, kind: KVKind, physical_pages: torch.Tensor) -> None:
        self._envelopes(kind).index_fill_(0, physical_pages, 0)

    def poison_pages(self, kind: KVKind, physical_pages: torch.Tensor) -> None:
        if self.poison:
            self._envelopes(kind).view(torch.int16).index_fill_(0, physical_pages, POISON)

    def move_pages(self, kind: KVKind, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy whole envelopes from `sources` to `targets`, disjoint physical pages, in stream order."""
        envelopes = self._envelopes(kind)
        envelopes.index_copy_(0, targets, envelopes.index_select(0, sources))

    def _envelopes(self, kind: KVKind) -> torch.Tensor:
        """[pages, page_bytes / 8] int64 over the sub-pool's whole range."""
        page_bytes = self.page_bytes(kind)
        return self._storage[: self.num_pages(kind) * page_bytes].view(torch.int64).view(-1, page_bytes // 8)


class TokenMajorPool(UnifiedPool):
    """Token-major: one entry holds all layers of a token, views are strided by it, kernel ids are physical ids."""

    mode: ClassVar[PoolMode] = "unified_token_major"

    def page_multiplier(self, kind: KVKind) -> int:
        return 1

    def _view(self, pool: KVGeometry, layer: int, head_dim: int, *, after_k: bool) -> torch.Tensor:
        rows, size = self.num_pages(pool.kind) * pool.page_size, pool.dtype.itemsize
        first = pool.layers.index(layer) * pool.layer_bytes + (pool.k_row_bytes if after_k else 0)
        return self._strided(pool, rows, head_dim, pool.entry_bytes(self.mode) // size, first // size)


UNIFIED_POOLS: dict[PoolMode, type[UnifiedPool]] = {pool.mode: pool for pool in (UnifiedPool, TokenMajorPool)}
