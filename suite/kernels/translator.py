"""Virtual ids to kernel ids, for reads and for exports; writes are translated when a batch is created.

One translator per runner. On a static pool the full-attention reads are the very same
`req_to_token` and row tensors and nothing is launched; its window pool has a full-to-window map,
which is a page map like any other. A runner translates only if the allocator's pool is its own
pool or its host, behind whose rows a fused draft keeps its own: a draft with a private pool that
borrows the target's allocator reads virtual ids as they are.
"""

import weakref
from dataclasses import dataclass
from typing import Protocol

import torch

from suite.errors import InputError, InvariantError
from suite.kernels.batch import ForwardBatch
from suite.kernels.ids import KernelIds, KVKind, PhysicalIds, VirtualIds, require_virtual
from suite.kernels.ops.read_stream import read_stream
from suite.kernels.ops.read_table import read_table
from suite.kernels.ops.write_loc import write_loc
from suite.kernels.pools import KVPool


class MappingAllocator(Protocol):
    """What a translator needs of an allocator."""

    pool: KVPool
    mutations: int  # grows with every change of any page map

    @property
    def moves_are_held(self) -> bool:
        """Whether every page stays where it is."""

    def page_map(self, kind: KVKind) -> torch.Tensor | None:
        """Virtual page -> physical page, int64 [virtual pages + 1], -1 unmapped; None where they coincide."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadSource:
    """Where reads of one sub-pool find their ids.

    `ids[row_ids[r], c]` is the entry of positions `c * entry_page_size` on of request r, so the row of
    position p is `ids[row_ids[r], p // entry_page_size] * entry_page_size + p % entry_page_size`.
    """

    ids: torch.Tensor
    row_ids: torch.Tensor
    entry_page_size: int
    is_translated: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class IndexTable:
    """The read sources of one batch."""

    full: ReadSource
    window: ReadSource | None

    def of(self, kind: KVKind) -> ReadSource:
        source = self.full if kind is KVKind.FULL else self.window
        if source is None:
            raise KeyError(f"this runner has no {kind} pool")
        return source


@dataclass(frozen=True, kw_only=True, eq=False)
class CaptureTables:
    """Stable page tables that captured graphs read: int32 [max_batch, columns], filled in place, never rebound."""

    full: torch.Tensor
    window: torch.Tensor | None


class KVIndexTranslator:
    """Reads, write locs and exports of one runner.

    req_to_token: [requests, max_context] int32 virtual ids; row 0 is the padding request, all sink.
    """

    def __init__(self, *, pool: KVPool, allocator: MappingAllocator, req_to_token: torch.Tensor) -> None:
        if req_to_token.dtype != torch.int32 or req_to_token.ndim != 2:
            raise InputError(
                "req_to_token", (req_to_token.dtype, tuple(req_to_token.shape)), "int32 [requests, tokens]"
            )
        self.pool, self.allocator, self.req_to_token = pool, allocator, req_to_token
        self.page_size = pool.geometry.page_size
        self.columns = -(-req_to_token.shape[1] // self.page_size)
        self.owns_ids = pool is allocator.pool or pool is allocator.pool.draft
        self.is_translating = self.owns_ids and pool.mode != "static"
        self._row_ids = torch.arange(req_to_token.shape[0], device=req_to_token.device)
        self._memo: tuple[weakref.ref[ForwardBatch], int, IndexTable] | None = None

    # -- reads -----------------------------------------------------------------------------------

    def read_map(self, kind: KVKind) -> tuple[torch.Tensor | None, int]:
        """(page map, page multiplier) that reads of `kind` go through; a None map is the identity."""
        return self._map(kind)

    def index_table_for_batch(self, batch: ForwardBatch) -> IndexTable:
        """The batch's index table, built once; a page that moved since makes a new one."""
        if self._memo is not None:
            known, mutations, table = self._memo
            if known() is batch and mutations == self.allocator.mutations:
                return table
        table = self.build_index_table(batch)
        self._memo = (weakref.ref(batch), self.allocator.mutations, table)
        return table

    def build_index_table(self, batch: ForwardBatch, into: CaptureTables | None = None) -> IndexTable:
        """Translate every read of `batch`, into the first rows of `into` when given (capture-stable)."""
        full, window = (None, None) if into is None else (into.full, into.window)
        return IndexTable(
            full=self._source(KVKind.FULL, batch, full),
            window=None if self.pool.geometry.window is None else self._source(KVKind.WINDOW, batch, window),
        )

    def fill_read_table(self, batch: ForwardBatch, kind: KVKind, out: torch.Tensor) -> None:
        """Write the batch's page table into the caller's `out` [>= batch, columns] int32.

        Prefix-only: columns past a request's last page, and rows past the batch, keep what they hold.
        A request longer than the table is cut at its width.
        """
        page_map, multiplier = self.read_map(kind)
        read_table(
            out,
            self.req_to_token,
            batch.req_rows,
            batch.seq_lens,
            page_map,
            multiplier,
            self.page_size,
            batch.max_seq_len,
        )

    def fill_read_stream(
        self, batch: ForwardBatch, kind: KVKind, starts: torch.Tensor, indptr: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Write the batch's CSR stream: `out[indptr[r] + i]` is the kernel id of position `starts[r] + i`.

        starts: [batch] int32, indptr: [batch + 1] int32, out: int32 or int64. Entries past indptr[-1] are kept.
        """
        source = self.index_table_for_batch(batch).of(kind)
        read_stream(out, source.ids, source.row_ids, source.entry_page_size, starts, indptr, batch.max_seq_len)

    def make_capture_tables(self, max_batch: int) -> CaptureTables:
        """Zero-filled stable tables: every entry is the sink until the first refill."""

        def table() -> torch.Tensor:
            return torch.zeros(max_batch, self.columns, dtype=torch.int32, device=self.req_to_token.device)

        return CaptureTables(full=table(), window=None if self.pool.geometry.window is None else table())

    # -- writes and exports ----------------------------------------------------------------------

    def write_loc(self, ids: VirtualIds) -> KernelIds:
        """Kernel ids of the full pool; negative, out-of-range and unmapped ids become the sink."""
        return KernelIds(self._translate(ids, KVKind.FULL, "write_loc"), KVKind.FULL)

    def sliding_window_write_loc_for(self, ids: VirtualIds) -> KernelIds | None:
        """Kernel ids of the window pool, straight from virtual ids; None where the runner has no window pool."""
        if self.pool.geometry.window is None:
            return None
        return KernelIds(self._translate(ids, KVKind.WINDOW, "sliding_window_write_loc_for"), KVKind.WINDOW)

    def export_ids(self, ids: VirtualIds, kind: KVKind) -> PhysicalIds:
        """Physical slots for a hand-off that copies bytes by them, inside the allocator's `hold_moves`.

        InvariantError where a page could move under the copy.
        """
        virtual = require_virtual(ids, "export_ids")
        if self.owns_ids and not self.allocator.moves_are_held:
            raise InvariantError("export_ids: moves held False != True: a page may move while its bytes are copied")
        page_map, _ = self._map(kind)
        return PhysicalIds(virtual if page_map is None else write_loc(virtual, page_map, 1, self.page_size), kind)

    # -- inside ----------------------------------------------------------------------------------

    def _map(self, kind: KVKind) -> tuple[torch.Tensor | None, int]:
        if not self.owns_ids:
            return None, 1
        return self.allocator.page_map(kind), self.pool.page_multiplier(kind)

    def _translate(self, ids: VirtualIds, kind: KVKind, where: str) -> torch.Tensor:
        virtual = require_virtual(ids, where)
        page_map, multiplier = self._map(kind)
        return virtual if page_map is None else write_loc(virtual, page_map, multiplier, self.page_size)

    def _fill(
        self, out: torch.Tensor, batch: ForwardBatch, page_map: torch.Tensor | None, page_multiplier: int
    ) -> None:
        rows, lens = batch.req_rows, batch.seq_lens
        read_table(out, self.req_to_token, rows, lens, page_map, page_multiplier, self.page_size, batch.max_seq_len)

    def _source(self, kind: KVKind, batch: ForwardBatch, into: torch.Tensor | None) -> ReadSource:
        page_map, multiplier = self.read_map(kind)
        if page_map is None:
            return ReadSource(ids=self.req_to_token, row_ids=batch.req_rows, entry_page_size=1, is_translated=False)
        if into is None:
            columns = -(-batch.max_seq_len // self.page_size)
            into = torch.zeros(batch.size, columns, dtype=torch.int32, device=self.req_to_token.device)
        read_table(
            into,
            self.req_to_token,
            batch.req_rows,
            batch.seq_lens,
            page_map,
            multiplier,
            self.page_size,
            batch.max_seq_len,
        )
        return ReadSource(
            ids=into, row_ids=self._row_ids[: batch.size], entry_page_size=self.page_size, is_translated=True
        )
