"""Byte proofs: what metadata names is where the books say it is, and what is handed out is clean.

They go round the translator: positions to virtual pages by the scheduler's lists, virtual to physical pages by the
allocator's own map on the host, physical pages to rows by the page multiplier, as the id spaces are defined.
"""

import numpy as np
import torch

from suite.e2e.faults.fault import Signal
from suite.e2e.faults.seams import unplanted
from suite.errors import InvariantError
from suite.kernels.allocators.paged import PageAllocator
from suite.kernels.attention.base import Metadata, PageTableMetadata
from suite.kernels.attention.csr import window_start
from suite.kernels.attention.reference import rows_of
from suite.kernels.batch import ForwardBatch
from suite.kernels.ids import KVKind


class Proofs:
    """Of one arm. Every proof returns its finding, None when there is none."""

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        self.allocator, self.page_size = allocator, page_size
        self.pool = allocator.pool

    def metadata(self, metadata: Metadata, batch: ForwardBatch, pages: list[list[int]]) -> Signal | None:
        """Every row that the first requests of `batch`, whose virtual pages are `pages`, may read and do write."""
        with unplanted():
            ends = batch.cu_query_lens.tolist()
            for kind in self._kinds():
                written = metadata.write_ids_of(kind).tensor.tolist()
                for request, mine in enumerate(pages):
                    seq_len, query_len = batch.seq_lens_host[request], batch.query_lens_host[request]
                    first = self._first(metadata, kind, seq_len, query_len)
                    want = self._rows(kind, mine, first, seq_len)
                    try:
                        got = rows_of(metadata, kind, request, first, seq_len).tolist()
                    except InvariantError as error:
                        return Signal(name="metadata.too_narrow", text=f"{kind} rows: {error}")
                    if got != want:
                        at = next(i for i, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1])
                        text = f"{kind} position {first + at}: row {got[at]}, expected {want[at]}"
                        return Signal(name="metadata.wrong_read_row", text=text)
                    new = written[ends[request] : ends[request + 1]]
                    if new != want[len(want) - query_len :]:
                        text = f"{kind} rows {new} are written, expected {want[len(want) - query_len :]}"
                        return Signal(name="metadata.wrong_write_row", text=text)
                padding = written[ends[len(pages)] : ends[batch.size]]
                if any(padding):
                    return Signal(name="metadata.padding_writes", text=f"{kind} padding writes rows {padding}, not 0")
        return None

    def cleared(self, pages: list[int]) -> Signal | None:
        """The rows of freshly handed-out pages are zero."""
        with unplanted():
            for pool in self.pool.geometry.pools:
                rows = torch.tensor(self._rows(pool.kind, pages, 0, len(pages) * self.page_size), dtype=torch.int64)
                for layer in pool.layers:
                    held = self.pool.k_view(layer)[rows.to(self.pool.device)]
                    if bool((held != 0).any()):
                        text = f"{pool.kind} pages {pages} are handed out with rows that are not zero"
                        return Signal(name="pool.unzeroed", text=text)
        return None

    def _first(self, metadata: Metadata, kind: KVKind, seq_len: int, query_len: int) -> int:
        window = self.pool.geometry.of(kind).window
        if window is None or isinstance(metadata, PageTableMetadata):
            return 0  # a page table has every column; pages that left the window are the sink
        return window_start(seq_len, query_len, window)

    def _rows(self, kind: KVKind, pages: list[int], first: int, end: int) -> list[int]:
        """Rows of positions [first, end); a page that is not bound is the sink page."""
        physical = np.maximum(self._host_map(kind)[pages], 0) if pages else np.zeros(0, dtype=np.int64)
        position = np.arange(first, end)
        begins = physical[position // self.page_size] * self.pool.page_multiplier(kind) * self.page_size
        rows: list[int] = (begins + position % self.page_size).tolist()
        return rows

    def _host_map(self, kind: KVKind) -> np.ndarray:
        for span in self.allocator.spans:
            if span.kind is kind:
                return span.map.host
        page_map = self.allocator.page_map(kind)
        return np.arange(self.allocator.virtual_pages) if page_map is None else page_map.cpu().numpy()

    def _kinds(self) -> list[KVKind]:
        return [pool.kind for pool in self.pool.geometry.pools]
