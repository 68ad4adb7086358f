"""The unified pool: one byte buffer that full and sliding-window KV share.

Every sub-pool's pages are counted from byte 0 and may reach the buffer's end; only the allocator
keeps them apart, so moving the boundary rebuilds nothing. A page is an envelope of row blocks
(`geometry.py`), which makes each layer's K and V one dense view over the whole buffer.
"""

import torch

from suite.kernels.geometry import KVGeometry, RunnerGeometry, plan_buffer
from suite.kernels.ids import KVKind
from suite.kernels.pools import POISON, KVPool


class UnifiedPool(KVPool):
    """Raises PoolTooSmallError, PageMapRangeError or UnequalRowsError before it allocates."""

    mode = "unified"

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
        self.buffer_bytes, self.spans = plan_buffer(geometry, buffer_bytes, max_request_tokens)
        self.sink_bytes = max(pool.page_bytes for pool in geometry.pools)
        # a layer's view starts at its own block, so its last page overruns the buffer by less than one page
        self._storage = torch.zeros(self.buffer_bytes + self.sink_bytes, dtype=torch.uint8, device=self.device)
        for pool in geometry.pools:
            for layer in pool.layers:
                self._k[layer] = self._view(pool, pool.k_block(layer))
                self._v[layer] = self._view(pool, pool.k_block(layer) + 1)
        if poison:
            self._storage[self.sink_bytes :].view(torch.int16).fill_(POISON)

    def _view(self, pool: KVGeometry, block: int) -> torch.Tensor:
        row = pool.kv_heads * pool.head_dim
        rows = self.num_pages(pool.kind) * pool.blocks_per_page * pool.page_size
        flat = self._storage[: self._storage.numel() // 16 * 16].view(pool.dtype)
        return flat.narrow(0, block * pool.page_size * row, rows * row).view(rows, pool.kv_heads, pool.head_dim)

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
        page_bytes = self.geometry.of(kind).page_bytes
        return self._storage[: self.num_pages(kind) * page_bytes].view(torch.int64).view(-1, page_bytes // 8)
