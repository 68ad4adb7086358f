"""Addressing faults: an id is not translated, translated twice, by the wrong map, or moved without its map.

Virtual and kernel ids share one range, so each of these runs, and reads or writes somebody else's row.
"""

from dataclasses import replace
from typing import Any

import torch

from suite.e2e.faults.detection.layers import (
    EAGER,
    EAGER_PAGE_TABLE,
    OVERLAP,
    PAGE_TABLE,
    REFERENCE,
    TOKEN_MAJOR,
    layers,
)
from suite.e2e.faults.fault import plants
from suite.errors import InputError
from suite.kernels.ids import KernelIds, KVKind, VirtualIds, require_virtual

TRANSLATOR = "suite.kernels.translator:KVIndexTranslator"
READ, WRITE, DIFFERS = "metadata.wrong_read_row", "metadata.wrong_write_row", "judge.outputs_differ"
SERVED, TABLES = layers(REFERENCE), layers(PAGE_TABLE)
EAGER_STREAMS, EAGER_TABLES = layers(EAGER), layers(EAGER_PAGE_TABLE)
AHEAD = layers(OVERLAP)


@plants("addressing", f"{TRANSLATOR}.read_map", SERVED, READ, DIFFERS, source="U1", smoke=True)
def read_skips_translation(own: Any) -> Any:
    """attention reads through virtual ids, as if the page map were the identity"""
    return lambda self, kind: (None, 1)


@plants("addressing", f"{TRANSLATOR}.read_map", SERVED, READ, DIFFERS, source="U4")
def read_translates_twice(own: Any) -> Any:
    """attention reads through the page map applied to its own result: in range, and wrong"""

    def twice(self: Any, kind: KVKind) -> Any:
        page_map, multiplier = own(self, kind)
        last = page_map.numel() - 1  # the row that is unmapped forever
        again = torch.where((page_map < 0) | (page_map > last), last, page_map)
        return page_map[again], multiplier

    return twice


@plants("addressing", f"{TRANSLATOR}.read_map", SERVED, READ, DIFFERS, source="U7")
def read_forgets_multiplier(own: Any) -> Any:
    """attention reads physical pages as if a page held one layer"""
    return lambda self, kind: (own(self, kind)[0], 1)


@plants("addressing", f"{TRANSLATOR}.read_map", TABLES, READ, DIFFERS, source="U7")
def window_reads_full_multiplier(own: Any) -> Any:
    """window layers find the right page and step by the full pool's layers"""
    return lambda self, kind: (own(self, kind)[0], own(self, KVKind.FULL)[1])


@plants("addressing", f"{TRANSLATOR}.read_map", SERVED, READ, DIFFERS, source="U11")
def window_reads_full_map(own: Any) -> Any:
    """window layers read through the full pool's map and multiplier"""
    return lambda self, kind: own(self, KVKind.FULL)


@plants("addressing", f"{TRANSLATOR}.read_map", TABLES, READ, DIFFERS, source="U12")
def window_derived_through_full(own: Any) -> Any:
    """the window map is looked up by full physical pages where virtual ones belong"""

    def derived(self: Any, kind: KVKind) -> Any:
        page_map, multiplier = own(self, kind)
        if kind is KVKind.FULL:
            return page_map, multiplier
        full, _ = own(self, KVKind.FULL)
        last = page_map.numel() - 1
        return page_map[torch.where((full < 0) | (full > last), last, full)], multiplier

    return derived


@plants("addressing", f"{TRANSLATOR}.read_map", layers(TOKEN_MAJOR), READ, DIFFERS, source="U8")
def multiplier_one_taken_for_off(own: Any) -> Any:
    """a multiplier of 1 is taken for a pool that does not translate"""

    def off(self: Any, kind: KVKind) -> Any:
        page_map, multiplier = own(self, kind)
        return (None, 1) if multiplier == 1 else (page_map, multiplier)

    return off


@plants("addressing", f"{TRANSLATOR}.read_map", TABLES, READ, source="U17")
def tombstone_reads_a_live_page(own: Any) -> Any:
    """pages that left the window are clamped to page 1, which is somebody's, and not to the sink"""

    def clamped(self: Any, kind: KVKind) -> Any:
        page_map, multiplier = own(self, kind)
        return page_map.clamp(min=1) if kind is KVKind.WINDOW else page_map, multiplier

    return clamped


@plants("addressing", f"{TRANSLATOR}._translate", SERVED, WRITE, DIFFERS, source="U2")
def write_skips_translation(own: Any) -> Any:
    """new rows are stored at virtual ids; reads stay right"""
    return lambda self, ids, kind, where: require_virtual(ids, where)


@plants("addressing", f"{TRANSLATOR}._translate", SERVED, WRITE, DIFFERS, source="U4")
def write_translates_twice(own: Any) -> Any:
    """the write loc is translated, and what came out is translated again"""
    return lambda self, ids, kind, where: own(self, VirtualIds(own(self, ids, kind, where)), kind, where)


@plants("addressing", "suite.kernels.translator:write_loc", SERVED, WRITE, DIFFERS, source="U7")
def write_forgets_multiplier(own: Any) -> Any:
    """new rows are stored at physical slots, as if a page held one layer"""
    return lambda virtual, page_map, multiplier, page_size: own(virtual, page_map, 1, page_size)


@plants("addressing", f"{TRANSLATOR}.sliding_window_write_loc_for", SERVED, WRITE, DIFFERS, source="U11")
def window_write_uses_full_ids(own: Any) -> Any:
    """window layers store their rows where the full pool's map says"""

    def full(self: Any, ids: VirtualIds) -> KernelIds:
        if self.pool.geometry.window is None:
            raise InputError("plant", "window_write_uses_full_ids", "a model with sliding-window layers")
        rows = min(self.pool.k_view(layer).shape[0] for layer in self.pool.geometry.window.layers)
        there = self.write_loc(ids).tensor
        return KernelIds(torch.where(there < rows, there, 0), KVKind.WINDOW)  # in range, as the real mistake would be

    return full


@plants("addressing", f"{TRANSLATOR}.sliding_window_write_loc_for", EAGER_TABLES, "ids.type_error", smoke=True)
def window_write_keeps_full_type(own: Any) -> Any:
    """window layers are handed ids of the full pool, still typed as such"""
    return lambda self, ids: self.write_loc(ids)


@plants("addressing", f"{TRANSLATOR}.write_loc", EAGER_TABLES, "ids.type_error")
def write_hands_virtual_ids_on(own: Any) -> Any:
    """the scheduler's ids reach the pool as they are, still typed as virtual"""
    return lambda self, ids: ids


@plants("addressing", f"{TRANSLATOR}.fill_read_stream", EAGER_STREAMS, READ, DIFFERS, source="U3")
def fresh_rows_read_untranslated(own: Any) -> Any:
    """the prefix of a stream is translated, the rows of this very forward are not"""

    def fill(self: Any, batch: Any, kind: KVKind, starts: Any, indptr: Any, out: torch.Tensor) -> None:
        own(self, batch, kind, starts, indptr, out)
        for row, end, length, new in zip(
            batch.req_rows.tolist(), indptr[1:].tolist(), batch.seq_lens_host, batch.query_lens_host, strict=True
        ):
            out[end - new : end] = self.req_to_token[row, length - new : length].to(out.dtype)

    return fill


@plants("addressing", "suite.kernels.translator:read_table", TABLES, READ, DIFFERS)
def read_table_ignores_rows(own: Any) -> Any:
    """the table of request i is read from row i + 1 of `req_to_token`, wherever the request sits"""

    def by_position(out: Any, table: Any, rows: torch.Tensor, *rest: Any) -> None:
        own(out, table, torch.where(rows > 0, torch.arange(1, rows.numel() + 1, device=rows.device), 0), *rest)

    return by_position


@plants("addressing", "suite.kernels.translator:read_table", TABLES, READ, DIFFERS, source="U10")
def read_table_row_spills(own: Any) -> Any:
    """a row's last entry is written one column too far, over the first entry of the next request"""

    def spill(out: torch.Tensor, *rest: Any) -> None:
        own(out, *rest)
        out[1:, 0] = out[:-1, -1]

    return spill


@plants("addressing", "suite.kernels.translator:read_table", TABLES, READ, DIFFERS, source="B06", severity=256)
def read_entry_wraps(own: Any) -> Any:
    """table entries are kept in too few bits: here 6, as 31 would be in a pool of more than 2^31 rows"""

    def wrapped(out: torch.Tensor, *rest: Any) -> None:
        own(out, *rest)
        out.remainder_(64)

    return wrapped


@plants("addressing", "suite.kernels.pools:write_kv", SERVED, DIFFERS, "runner.not_finite", source="B06", severity=128)
def write_offset_wraps(own: Any) -> Any:
    """row times stride is computed in too few bits: here rows wrap at 128, in a large pool at 2^31 elements"""
    return lambda k_view, v_view, ids, *rest: own(k_view, v_view, ids.remainder(128), *rest)


@plants(
    "addressing",
    "suite.kernels.attention.fa3:plan_page_table",
    EAGER_TABLES,
    "metadata.too_narrow",
    "attention.invariant",
    source="B04",
    severity=4,
)
def page_size_leaks_as_one(own: Any) -> Any:
    """metadata of pages of 4 tells the kernel that pages hold 1 token"""
    return lambda batch, translator: replace(own(batch, translator), page_size=1)


@plants("addressing", "suite.kernels.attention.fa3:plan_page_table", EAGER_TABLES, READ, DIFFERS, source="B04")
def page_size_applied_twice(own: Any) -> Any:
    """the table holds first rows of pages, and the kernel multiplies by the page size again"""

    def rows(batch: Any, translator: Any) -> Any:
        right = own(batch, translator)
        return replace(right, page_table=right.page_table * right.page_size % 64)

    return rows


@plants(
    "addressing",
    "suite.kernels.batch:ForwardBatch.max_seq_len",
    EAGER_TABLES,
    "metadata.too_narrow",
    "attention.invariant",
    source="U23",
)
def table_width_from_stale_lengths(own: Any) -> Any:
    """tables are as wide as the longest request was a page ago"""
    return lambda self: max(1, own(self) - 4)


@plants("addressing", f"{TRANSLATOR}.index_table_for_batch", EAGER_STREAMS, READ, DIFFERS, source="U19")
def memo_outlives_a_move(own: Any) -> Any:
    """the index table of an equally large batch is reused although pages have moved since"""
    known: dict[Any, Any] = {}

    def memoised(self: Any, batch: Any) -> Any:
        key = (id(self), batch.req_rows.tolist().__repr__(), batch.max_seq_len // 4)
        return known.setdefault(key, own(self, batch))

    return memoised


@plants("addressing", "suite.kernels.pools.unified:UnifiedPool.move_pages", SERVED, DIFFERS, smoke=True)
def move_copies_nothing(own: Any) -> Any:
    """compaction rewrites the page map and leaves the rows where they were"""
    return lambda self, kind, sources, targets: None


@plants("addressing", "suite.kernels.pools.unified:UnifiedPool.move_pages", SERVED, DIFFERS, severity=1)
def move_forgets_the_first_page(own: Any) -> Any:
    """compaction moves every page of a batch of moves but the first"""
    return lambda self, kind, sources, targets: own(self, kind, sources[1:], targets[1:])


@plants("addressing", "suite.kernels.allocators.books:PageMap.set", SERVED, "allocators.invariant", READ, DIFFERS)
def moved_map_stays_on_the_host(own: Any) -> Any:
    """the host's map follows a move of a single page, the device's copy does not"""

    def host_only(self: Any, virtual: Any, physical: Any) -> None:
        before = self.device.clone()
        own(self, virtual, physical)
        if len(virtual) == 1:
            self.device.copy_(before)

    return host_only


@plants(
    "addressing", "suite.kernels.allocators.multi_ended:Span.rank_of", SERVED, "allocators.invariant", "child.crash"
)
def rank_of_the_wrong_end(own: Any) -> Any:
    """the full span counts its ranks from the end it does not grow from"""
    return lambda self, page: page - self.plan.min_page


@plants("addressing", "suite.kernels.allocators.multi_ended:Span.pack", AHEAD, DIFFERS, source="U15")
def move_of_a_page_in_flight(own: Any) -> Any:
    """a page that the forward in flight writes is moved away under it"""
    return lambda self, *, keep, forward_in_flight, limit=None: own(
        self, keep=frozenset(), forward_in_flight=forward_in_flight, limit=limit
    )


@plants("addressing", "suite.kernels.allocators.multi_ended:Span.pack", AHEAD, DIFFERS, source="U14")
def moved_page_reused_in_flight(own: Any) -> Any:
    """a page that was moved away is handed out again while the forward in flight still reads it"""
    return lambda self, *, keep, forward_in_flight, limit=None: own(
        self, keep=keep, forward_in_flight=False, limit=limit
    )
