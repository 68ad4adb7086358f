"""Page-table metadata of a batch, eager or captured, for the backends that read int32 page tables.

Eager, the translator's table is used as it is when it already has this page size. Captured, stable
tables are refilled in place, outside the graph: inside it nothing but lengths may change with them.
"""

from typing import Literal

import torch

from suite.kernels.attention.base import PageTableMetadata
from suite.kernels.attention.csr import CaptureLimits, refill_write_ids
from suite.kernels.batch import ForwardBatch, ForwardMode
from suite.kernels.geometry import pages_for
from suite.kernels.ids import KernelIds, KVKind
from suite.kernels.translator import CaptureTables, KVIndexTranslator

Tail = Literal["stale", "sink"]


def plan_page_table(batch: ForwardBatch, translator: KVIndexTranslator) -> PageTableMetadata:
    """Metadata of one eager forward. Its tables are packed: contiguous, as wide as the longest request."""
    has_window = translator.pool.geometry.window is not None
    return PageTableMetadata(
        mode=batch.mode,
        seq_lens=batch.seq_lens,
        cu_query_lens=batch.cu_query_lens,
        max_query_len=max(batch.query_lens_host),
        max_seq_len=batch.max_seq_len,
        write_ids=batch.write_ids,
        window_write_ids=batch.window_write_ids,
        page_size=translator.page_size,
        page_table=_eager_table(batch, translator, KVKind.FULL),
        window_page_table=_eager_table(batch, translator, KVKind.WINDOW) if has_window else None,
    )


class PageTableCapture:
    """Stable tables, lengths and write ids of captured decodes and verifies; refilled in place, never rebound.

    Both modes, and all sizes up to `max_batch` requests, share them but for `cu_query_lens`, which is constant.
    `tail` says what lies past a request's last page: "stale" keeps what an earlier batch left there,
    "sink" clears the batch's rows first, for kernels that may look at an entry they then mask.
    """

    def __init__(
        self, translator: KVIndexTranslator, max_batch: int, draft_tokens: int = 1, tail: Tail = "stale"
    ) -> None:
        self.limits = CaptureLimits(max_batch=max_batch, draft_tokens=draft_tokens)
        self.translator, self.tail = translator, tail
        device = translator.req_to_token.device
        self.tables: CaptureTables = translator.make_capture_tables(max_batch)
        self.seq_lens = torch.zeros(max_batch, dtype=torch.int32, device=device)
        each = torch.arange(max_batch + 1, dtype=torch.int32, device=device)
        self.cu_query_lens = {ForwardMode.DECODE: each, ForwardMode.VERIFY: each * draft_tokens}
        self.write_ids = torch.zeros(max_batch * draft_tokens, dtype=torch.int64, device=device)
        self.window_write_ids = None if self.tables.window is None else torch.zeros_like(self.write_ids)

    def refill(self, batch: ForwardBatch) -> PageTableMetadata:
        """Metadata of `batch` in the stable buffers; the same addresses for every batch of its size and mode."""
        self.limits.require(batch)
        size, window = batch.size, self.tables.window
        self.seq_lens[:size].copy_(batch.seq_lens)
        self._fill(batch, KVKind.FULL, self.tables.full)
        write_ids = refill_write_ids(self.write_ids, batch, KVKind.FULL)
        window_write_ids = None
        if window is not None and self.window_write_ids is not None:
            self._fill(batch, KVKind.WINDOW, window)
            written = refill_write_ids(self.window_write_ids, batch, KVKind.WINDOW)
            window_write_ids = KernelIds(written, KVKind.WINDOW)
        return PageTableMetadata(
            mode=batch.mode,
            seq_lens=self.seq_lens[:size],
            cu_query_lens=self.cu_query_lens[batch.mode][: size + 1],
            max_query_len=batch.query_lens_host[0],
            max_seq_len=self.translator.req_to_token.shape[1],
            write_ids=KernelIds(write_ids, KVKind.FULL),
            window_write_ids=window_write_ids,
            page_size=self.translator.page_size,
            page_table=self.tables.full[:size],
            window_page_table=None if window is None else window[:size],
        )

    def _fill(self, batch: ForwardBatch, kind: KVKind, table: torch.Tensor) -> None:
        if self.tail == "sink":
            table[: batch.size].zero_()
        self.translator.fill_read_table(batch, kind, table)


def _eager_table(batch: ForwardBatch, translator: KVIndexTranslator, kind: KVKind) -> torch.Tensor:
    source = translator.index_table_for_batch(batch).of(kind)
    if source.is_translated and source.entry_page_size == translator.page_size:
        return source.ids  # its rows are the batch's, in order
    columns = pages_for(batch.max_seq_len, translator.page_size)
    table = torch.zeros(batch.size, columns, dtype=torch.int32, device=translator.req_to_token.device)
    translator.fill_read_table(batch, kind, table)
    return table
