"""State faults: whose page, slot or snapshot it is, until when it is kept, and from which token on it goes on.

Window rows, recurrent states and shared prefixes outlive a step. Greedy answers must be the static pool's, with the
prefix cache on, when memory is short, and behind rejected drafts.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from suite.e2e.faults.detection.layers import REFERENCE, layers
from suite.e2e.faults.detection.serving import serving
from suite.e2e.faults.fault import plants

LOGITS, NAN, BOOKS = "judge.logits_differ", "engine.not_finite", "allocators.invariant"
ENGINE_BOOKS, SHAPES = "engine.invariant", "judge.shapes_differ"
DIFFERS = "judge.outputs_differ"
MEMORY, CACHE = "suite.e2e.engine.memory:RequestMemory", "suite.e2e.engine.prefix_cache:PrefixCache"
SLOTS, LINEAR = "suite.kernels.allocators.slots:SlotAllocator", "suite.kernels.linear.base:LinearBackend"
SPAN, PAGES = "suite.kernels.allocators.multi_ended:Span", "suite.kernels.allocators.books:FreePages"
SERVED, PLAIN = layers(REFERENCE), serving()
CACHED, HYBRID = serving(prefix_cache=True), serving("hybrid")
SHORT = serving(prefix_cache=True, pool_pages=20)
HYBRID_CACHED = serving("hybrid", prefix_cache=True)
HYBRID_DRAFTED = serving("hybrid", speculation_of="scripted")


# -- pages -----------------------------------------------------------------------------------------


@plants(
    "state", "suite.kernels.pools.unified:UnifiedPool.zero_pages", SERVED, "pool.unzeroed", source="U26", smoke=True
)
def pages_handed_out_uncleared(own: Any) -> Any:
    """freshly bound pages keep what was in them: a kernel that multiplies masked rows by 0 makes NaN of it"""
    return lambda self, kind, pages: None


@plants("state", "suite.kernels.pools.unified:UnifiedPool.zero_pages", SERVED, "pool.unzeroed", source="U8")
def window_pages_handed_out_uncleared(own: Any) -> Any:
    """only full pages are cleared when they are handed out"""
    return lambda self, kind, pages: own(self, kind, pages) if kind == "full" else None


@plants("state", f"{PAGES}.take", SERVED, BOOKS, "allocators.crash", DIFFERS, source="B09")
def a_page_handed_out_twice(own: Any) -> Any:
    """the last page of every allocation stays in the free list"""

    def twice(self: Any, count: int) -> list[int]:
        pages: list[int] = own(self, count)
        self.put(pages[-1:])
        return pages

    return twice


@plants("state", f"{PAGES}.put", SERVED, BOOKS, source="U18")
def sink_on_the_free_list(own: Any) -> Any:
    """freeing a segment with an unmapped page puts page 0, the sink, on the free list"""
    return lambda self, pages: own(self, [0, *pages[1:]])


@plants("state", f"{SPAN}.unbind", SERVED, BOOKS, source="U31")
def freed_page_never_returns(own: Any) -> Any:
    """of the pages freed in one call, the physical page of the first is never a hole again"""
    return lambda self, virtual, written: own(self, virtual[1:], written)


@plants("state", f"{SPAN}.unbind", SERVED, BOOKS, source="B09")
def tombstone_keeps_its_mapping(own: Any) -> Any:
    """a tombstoned window page still maps to its physical page, which is given to another request"""

    def kept(self: Any, virtual: Any, written: Any) -> None:
        before = self.map.host[list(virtual)].copy()
        own(self, virtual, written)
        if self.kind == "window":
            self.map.set(list(virtual), before)

    return kept


@plants("state", "suite.kernels.allocators.window:UnifiedAllocator._unbind_window", SERVED, BOOKS)
def window_eviction_frees_nothing(own: Any) -> Any:
    """pages that left the window are counted as gone and stay bound"""
    return lambda self, virtual: None


@plants("state", "suite.kernels.allocators.paged:PageAllocator.free", PLAIN, BOOKS, ENGINE_BOOKS, source="B09")
def pages_freed_twice(own: Any) -> Any:
    """what a request held is freed once more"""

    return lambda self, virtual: (own(self, virtual), own(self, list(virtual)[-1:]))


@plants("state", f"{MEMORY}._out_of_window", PLAIN, LOGITS, NAN, source="B07", severity=4)
def window_evicted_a_page_early(own: Any) -> Any:
    """one page more than has left the window is tombstoned"""
    return lambda self, request: min(own(self, request) + 1, len(request.pages))


@plants("state", f"{MEMORY}._give_back", PLAIN, ENGINE_BOOKS, BOOKS, severity=1)
def released_request_keeps_a_page(own: Any) -> Any:
    """a request that ends gives back all its pages but the last"""

    def leak(self: Any, request: Any) -> None:
        request.pages = request.pages[:-1]
        own(self, request)

    return leak


# -- shared prefixes -------------------------------------------------------------------------------


@plants("state", f"{CACHE}._is_reusable", CACHED, LOGITS, NAN, source="B07", smoke=True)
def tombstoned_prefix_reused(own: Any) -> Any:
    """a prefix is reused although its window rows are gone: they are read from the sink"""
    return lambda self, path: True


@plants("state", f"{CACHE}._path", CACHED, LOGITS, ENGINE_BOOKS)
def prefix_found_by_its_last_token(own: Any) -> Any:
    """the cache compares the last token of a page and takes the page's other tokens as given"""

    def loose(self: Any, tokens: Any, most: int) -> Any:
        node = self.root
        for begin in range(0, most - self.page_size + 1, self.page_size):
            key = tuple(tokens[begin : begin + self.page_size])
            child = next((c for known, c in node.children.items() if known[-1] == key[-1] or not begin), None)
            if child is None:
                return
            node = child
            yield node

    return loose


@plants("state", f"{CACHE}._hold", CACHED, ENGINE_BOOKS, BOOKS)
def cached_pages_have_no_holder(own: Any) -> Any:
    """the cache lists pages without holding them: they go to somebody else when their request ends"""
    return lambda self, node: None


@plants("state", f"{MEMORY}._share_prefix", CACHED, LOGITS, SHAPES, ENGINE_BOOKS, severity=4)
def prefix_counted_a_page_too_long(own: Any) -> Any:
    """a request that found a prefix goes on one page behind its end"""

    def longer(self: Any, request: Any) -> Any:
        prefix = own(self, request)
        if prefix.pages and request.reusable >= request.computed + self.page_size:
            request.computed += self.page_size
        return prefix

    return longer


@plants("state", f"{MEMORY}._fill_row", CACHED, LOGITS, NAN, severity=4)
def last_shared_page_missing_in_the_row(own: Any) -> Any:
    """the row of a request that found a prefix keeps an old entry for the prefix's last page"""

    def short(self: Any, request: Any) -> None:
        pages = request.pages[:-1]
        own(self, SimpleNamespace(computed=request.computed and len(pages), pages=pages, row=request.row))

    return short


@plants("state", "suite.e2e.engine.scheduler:Scheduler._make_room", SHORT, LOGITS, SHAPES)
def retracted_request_forgets_its_answer(own: Any) -> Any:
    """a request that had to step back comes back with its prompt only, and says its first tokens twice"""

    def forgets(self: Any, requests: Any, query_lens: Any) -> bool:
        done: bool = own(self, requests, query_lens)
        if not done:
            back = self.waiting[0]
            back.tokens = back.tokens[: len(back.prompt)]
        return done

    return forgets


# -- recurrent state -------------------------------------------------------------------------------


@plants("state", f"{SLOTS}.restore", HYBRID_CACHED, LOGITS, NAN, source="B12")
def hit_restores_nothing(own: Any) -> Any:
    """a prefix hit goes on from whatever is in the request's own slot"""
    return lambda self, snapshot, slot: snapshot.position


@plants("state", f"{SLOTS}.snapshot", HYBRID_CACHED, LOGITS, ENGINE_BOOKS, source="B11", severity=8)
def snapshot_filed_a_block_late(own: Any) -> Any:
    """a state is kept under a block end that it has not reached"""
    return lambda self, slot, position: own(self, slot, position + 8)


@plants("state", f"{SLOTS}._copy", HYBRID_CACHED, LOGITS, NAN, source="B12")
def snapshot_takes_its_neighbours_state(own: Any) -> Any:
    """a snapshot is copied from the slot behind the one it is of"""
    return lambda self, source, target: own(self, 1 + source % self.pool.slots, target)


@plants("state", f"{LINEAR}.plan", HYBRID, LOGITS, NAN, source="U26")
def first_prefill_reads_its_slot(own: Any) -> Any:
    """a request's first prefill starts from what its slot held before, not from zeros"""

    def begun(self: Any, batch: Any, slots: Any, **more: Any) -> Any:
        metadata = own(self, batch, slots, **more)
        return metadata if metadata.sources is None else replace(metadata, sources=metadata.slots.tensor)

    return begun


@plants("state", "suite.kernels.ops.state_rows:copy_rows_torch", HYBRID, LOGITS, NAN, "ops.crash", source="U29")
def skipped_slot_is_written(own: Any) -> Any:
    """a negative slot is taken for the last one: padding and freed slots write somebody's state"""

    def unguarded(target: Any, target_rows: torch.Tensor, source: Any, source_rows: torch.Tensor) -> None:
        own(target, target_rows.remainder(target.shape[1]), source, source_rows.remainder(source.shape[1]))

    return unguarded


@plants("state", "suite.kernels.linear.base:gather_rows", HYBRID, LOGITS, NAN)
def state_transposed_at_prefill(own: Any) -> Any:
    """a later chunk of a prefill takes the state matrix as [K, V] where it is [V, K]"""

    def transposed(source: Any, rows: Any) -> Any:
        out = own(source, rows)
        return out.transpose(-1, -2).contiguous() if out.ndim == 4 else out

    return transposed


@plants("state", "suite.kernels.linear.delta:gather_rows", HYBRID, LOGITS, NAN, severity=1)
def convolution_window_shifted(own: Any) -> Any:
    """a later chunk of a prefill finds the convolution's last inputs one place off"""

    def shifted(source: Any, rows: Any) -> Any:
        out = own(source, rows)
        return out.roll(1, -1) if out.ndim == 3 else out

    return shifted


@plants(
    "state",
    "suite.kernels.pools.state:VerifyScratch.commit",
    HYBRID_DRAFTED,
    LOGITS,
    "engine.drafts_change_answers",
    source="B19",
)
def rejected_drafts_stay_in_the_state(own: Any) -> Any:
    """after a verify the state is the one behind the last draft, accepted or not"""
    return lambda self, pool, rows, slots, nodes: own(
        self, pool, rows, slots, torch.where(nodes >= 0, self.draft_tokens - 1, nodes)
    )


@plants(
    "state",
    "suite.kernels.pools.state:VerifyScratch.commit",
    HYBRID_DRAFTED,
    LOGITS,
    "engine.drafts_change_answers",
    source="B19",
)
def accepted_drafts_not_committed(own: Any) -> Any:
    """after a verify the state is still the one before it"""
    return lambda self, pool, rows, slots, nodes: None


@plants(
    "state",
    "suite.kernels.pools.state:VerifyScratch.commit",
    HYBRID_DRAFTED,
    LOGITS,
    "engine.drafts_change_answers",
    severity=1,
)
def commit_one_token_short(own: Any) -> Any:
    """the state is advanced by one token less than was accepted"""
    return lambda self, pool, rows, slots, nodes: own(self, pool, rows, slots, nodes - 1)


@plants("state", "suite.kernels.allocators.slots:SlotAllocator.kernel_slots", HYBRID, LOGITS, NAN)
def slots_of_a_batch_reversed(own: Any) -> Any:
    """the state slots of a batch are in another order than its requests"""

    def turned(self: Any, slots: Any) -> Any:
        right = own(self, slots)
        tensor = right.tensor.clone()
        tensor[right.tensor > 0] = right.tensor[right.tensor > 0].flip(0)
        return replace(right, tensor=tensor)

    return turned
