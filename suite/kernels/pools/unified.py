"""The unified pools: one byte buffer that all sub-pools of a runner share, state slots and fused draft rows included.

Every sub-pool's pages are counted from byte 0 and may reach the buffer's end; only the allocator
keeps them apart, so moving the boundary rebuilds nothing. The two classes differ in how a page lays
out its rows, see `geometry.py`.
"""

from typing import ClassVar

import torch

from suite.kernels.geometry import STATE, KVGeometry, RunnerGeometry
from suite.kernels.ids import KVKind
from suite.kernels.pools import POISON, KVPool
from suite.kernels.pools.layout import plan_buffer
from suite.kernels.pools.state import StatePool
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
        self.sink_bytes = max(span.page_bytes for span in self.spans.values())
        # a layer's view starts at its own block, so its last page overruns the buffer by less than one page
        tail = max(self.page_bytes(pool.kind) for pool in geometry.pools)
        self._storage = torch.zeros(self.buffer_bytes + tail, dtype=torch.uint8, device=self.device)
        if geometry.state is not None:
            slots = self.spans[STATE].num_pages - 1
            self.state = StatePool.strided(geometry.state, slots, self._storage, poison=poison)
        self._add_views(self, geometry, {pool.kind: 0 for pool in geometry.pools})
        if geometry.draft is not None:
            self.draft = FusedPool(self, geometry.draft)
            self._add_views(self.draft, geometry.draft, {pool.kind: 1 for pool in geometry.draft.pools})
        if poison:
            self._storage[: self.sink_bytes].zero_()
            self._storage[self.sink_bytes :].view(torch.int16).fill_(POISON)

    def _add_views(self, owner: KVPool, geometry: RunnerGeometry, place: dict[KVKind, int]) -> None:
        """Give `owner` its views: of the rows that stand at `place` in the pages of each kind, 0 for the host's."""
        for pool in geometry.pools:
            before = self.geometry.rows_of(pool.kind)[: place[pool.kind]]
            for layer in pool.layers:
                owner._k[layer] = self._view(pool, before, layer, pool.head_dim, after_k=False)
                if pool.is_latent:
                    owner._v[layer] = owner._k[layer][..., : pool.value_dim]
                else:
                    owner._v[layer] = self._view(pool, before, layer, pool.value_dim, after_k=True)

    def _view(
        self, pool: KVGeometry, before: tuple[KVGeometry, ...], layer: int, head_dim: int, *, after_k: bool
    ) -> torch.Tensor:
        """Rows of one layer's K, or of its V, over the whole buffer, behind the rows of `before` in each page."""
        rows = self.num_pages(pool.kind) * self.page_multiplier(pool.kind) * pool.page_size
        width = pool.kv_heads * head_dim
        block = sum(other.blocks_per_page for other in before) + pool.k_block(layer) + after_k
        return self._strided(pool, rows, head_dim, width, block * pool.page_size * width)

    def _strided(self, pool: KVGeometry, rows: int, head_dim: int, row_stride: int, first: int) -> torch.Tensor:
        typed = self._storage.view(pool.dtype)
        return typed.as_strided((rows, pool.kv_heads, head_dim), (row_stride, head_dim, 1), first)

    def num_pages(self, kind: KVKind) -> int:
        return self.spans[kind].num_pages

    def page_multiplier(self, kind: KVKind) -> int:
        return self.geometry.blocks_per_page(kind)

    def zero_pages(self, kind: str, physical_pages: torch.Tensor) -> None:
        if kind != STATE:  # a request's first prefill starts from zeros by itself
            self._envelopes(kind).index_fill_(0, physical_pages, 0)

    def poison_pages(self, kind: str, physical_pages: torch.Tensor) -> None:
        if self.poison:
            self._envelopes(kind).view(torch.int16).index_fill_(0, physical_pages, POISON)

    def move_pages(self, kind: str, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy whole envelopes from `sources` to `targets`, disjoint physical pages or slots, in stream order."""
        envelopes = self._envelopes(kind)
        envelopes.index_copy_(0, targets, envelopes.index_select(0, sources))

    def _envelopes(self, kind: str) -> torch.Tensor:
        """[pages, page_bytes / 8] int64 over the sub-pool's whole range."""
        span = self.spans[kind]
        return self._storage[: span.num_pages * span.page_bytes].view(torch.int64).view(-1, span.page_bytes // 8)


class TokenMajorPool(UnifiedPool):
    """Token-major: one entry holds all layers of a token, views are strided by it, kernel ids are physical ids."""

    mode: ClassVar[PoolMode] = "unified_token_major"

    def page_multiplier(self, kind: KVKind) -> int:
        return 1

    def _view(
        self, pool: KVGeometry, before: tuple[KVGeometry, ...], layer: int, head_dim: int, *, after_k: bool
    ) -> torch.Tensor:
        rows, size = self.num_pages(pool.kind) * pool.page_size, pool.dtype.itemsize
        behind = sum(len(other.layers) * other.layer_bytes for other in before)  # whole rows, so aligned like them
        first = behind + pool.layers.index(layer) * pool.layer_bytes + (pool.k_row_bytes if after_k else 0)
        entry = self.page_bytes(pool.kind) // pool.page_size
        return self._strided(pool, rows, head_dim, entry // size, first // size)


class FusedPool(KVPool):
    """A draft's rows behind its host's: views of its own, the host's pages, ids and page maps.

    The host clears, poisons and moves whole pages, and with them these rows.
    """

    def __init__(self, host: UnifiedPool, geometry: RunnerGeometry) -> None:
        super().__init__(geometry, host.device, host.poison)
        self.host = host
        self.mode = host.mode  # type: ignore[misc]

    def num_pages(self, kind: KVKind) -> int:
        return self.host.num_pages(kind)

    def page_multiplier(self, kind: KVKind) -> int:
        return self.host.page_multiplier(kind)

    def zero_pages(self, kind: KVKind, physical_pages: torch.Tensor) -> None:
        self.host.zero_pages(kind, physical_pages)

    def poison_pages(self, kind: KVKind, physical_pages: torch.Tensor) -> None:
        self.host.poison_pages(kind, physical_pages)


UNIFIED_POOLS: dict[PoolMode, type[UnifiedPool]] = {pool.mode: pool for pool in (UnifiedPool, TokenMajorPool)}
