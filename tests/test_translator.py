"""The translator against an independent formula, on maps that random churn has made."""

import gc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from suite.errors import InputError, InvariantError
from suite.kernels.batch import ForwardBatch, ForwardMode
from suite.kernels.ids import KVKind, VirtualIds
from suite.kernels.translator import KVIndexTranslator
from tests import tiny

CONTEXT = 32


class Rig:
    """Two requests on a churned pool, with the plain-Python truth beside them."""

    def __init__(self, mode: str, lengths: tuple[int, ...], page_size: int = 4, window: int = 3, seed: int = 0) -> None:
        self.page_size = page_size
        self.allocator = tiny.allocator(mode, tiny.geometry(page_size, 2, window), pages=180)
        self.lengths = lengths
        rng = np.random.default_rng(seed)
        ballast = self.allocator.alloc(6)
        self.pages = []
        for length in lengths:
            self.pages.append(self.allocator.alloc(-(-length // page_size)))
            ballast += self.allocator.alloc(2)
        rng.shuffle(ballast)
        self.allocator.free(ballast)
        if mode != "static":
            self.allocator.compact()
        self.req_to_token = torch.zeros(len(lengths) + 1, CONTEXT, dtype=torch.int32)
        for row, (pages, length) in enumerate(zip(self.pages, lengths, strict=True), 1):
            for position in range(length):
                self.req_to_token[row, position] = pages[position // page_size] * page_size + position % page_size
        self.translator = KVIndexTranslator(
            pool=self.allocator.pool, allocator=self.allocator, req_to_token=self.req_to_token
        )

    def batch(self) -> ForwardBatch:
        return ForwardBatch.create(
            mode=ForwardMode.DECODE,
            input_ids=[0] * len(self.lengths),
            req_rows=list(range(1, len(self.lengths) + 1)),
            seq_lens=list(self.lengths),
            query_lens=[1] * len(self.lengths),
            virtual_write_ids=VirtualIds(
                torch.stack([self.req_to_token[r + 1, n - 1].long() for r, n in enumerate(self.lengths)])
            ),
            translator=self.translator,
        )

    def entry(self, kind: KVKind, page: int) -> int:
        """A page's entry, from the host's map and the definition alone."""
        if self.allocator.pool.mode == "static" and kind is KVKind.FULL:
            return page
        span = next((s for s in getattr(self.allocator, "spans", ()) if s.kind is kind), None)
        at = int(span.map.host[page]) if span else int(self.allocator._window_map.host[page])
        return max(at, 0) * self.allocator.pool.page_multiplier(kind)

    def kernel_id(self, kind: KVKind, request: int, position: int) -> int:
        page = self.pages[request][position // self.page_size]
        return self.entry(kind, page) * self.page_size + position % self.page_size


rigs = st.builds(
    Rig,
    mode=st.sampled_from(["static", "unified", "unified_token_major"]),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3).map(tuple),
    page_size=st.sampled_from([1, 4]),
    window=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 5),
)


@settings(deadline=None, max_examples=60)
@given(rig=rigs, evict=st.booleans())
def test_tables_and_streams_equal_the_formula(rig, evict):
    kinds = [pool.kind for pool in rig.allocator.pool.geometry.pools]
    if evict:
        rig.allocator.evict_window(rig.pages[0][:1])
    batch = rig.batch()
    for kind in kinds:
        table = torch.full((len(rig.lengths) + 1, CONTEXT // rig.page_size), -7, dtype=torch.int32)
        rig.translator.fill_read_table(batch, kind, table)
        starts = torch.tensor([max(0, n - 5) for n in rig.lengths], dtype=torch.int32)
        counts = torch.tensor(rig.lengths) - starts
        indptr = torch.cat([torch.zeros(1), counts.cumsum(0)]).to(torch.int32)
        stream = torch.full((int(indptr[-1]) + 3,), -7, dtype=torch.int32)
        rig.translator.fill_read_stream(batch, kind, starts, indptr, stream)
        want = []
        for request, length in enumerate(rig.lengths):
            used = -(-length // rig.page_size)
            entries = [rig.entry(kind, page) for page in rig.pages[request][:used]]
            assert table[request, :used].tolist() == entries
            assert (table[request, used:] == -7).all(), "wrote past the live prefix"
            want += [rig.kernel_id(kind, request, p) for p in range(int(starts[request]), length)]
        assert (table[-1] == -7).all(), "wrote another request's row"
        assert stream.tolist() == [*want, -7, -7, -7]


@settings(deadline=None, max_examples=40)
@given(rig=rigs)
def test_write_loc_is_translated_once_and_pads_to_the_sink(rig):
    batch = rig.batch()
    last = [(r, n - 1) for r, n in enumerate(rig.lengths)]
    assert batch.write_ids.tensor.tolist() == [rig.kernel_id(KVKind.FULL, r, p) for r, p in last]
    bad = VirtualIds(torch.tensor([-1, -9, 0, 10**6]))
    if rig.allocator.pool.mode != "static":
        assert rig.translator.write_loc(bad).tensor.tolist() == [0, 0, 0, 0]
    if batch.window_write_ids is None:
        assert rig.allocator.pool.geometry.window is None
    else:
        assert batch.window_write_ids.tensor.tolist() == [rig.kernel_id(KVKind.WINDOW, r, p) for r, p in last]
        assert rig.translator.sliding_window_write_loc_for(bad).tensor.tolist() == [0, 0, 0, 0]


def test_static_hands_back_the_same_objects():
    rig = Rig("static", (5, 9), window=0)
    batch = rig.batch()
    source = rig.translator.index_table_for_batch(batch).full
    assert source.ids is rig.req_to_token
    assert source.row_ids is batch.req_rows
    assert (source.entry_page_size, source.is_translated) == (1, False)
    assert batch.write_ids.tensor is batch.virtual_write_ids.tensor


def test_table_is_memoised_until_a_page_moves():
    rig = Rig("unified", (9, 13))
    batch = rig.batch()
    table = rig.translator.index_table_for_batch(batch)
    assert rig.translator.index_table_for_batch(batch) is table
    assert rig.translator.index_table_for_batch(rig.batch()) is not table
    table = rig.translator.index_table_for_batch(batch)
    rig.allocator.free([rig.pages[0].pop()])
    assert rig.translator.index_table_for_batch(batch) is not table
    # a dead batch must not lend its table to a new one at the same address
    del batch
    gc.collect()
    assert rig.translator._memo[0]() is None


def test_capture_tables_are_refilled_never_rebound():
    rig = Rig("unified", (9, 13))
    tables = rig.translator.make_capture_tables(4)
    assert not tables.full.any()
    assert not tables.window.any()
    addresses = (tables.full.data_ptr(), tables.window.data_ptr())
    first = rig.translator.build_index_table(rig.batch(), into=tables)
    before = tables.full.clone()
    rig.allocator.free(rig.pages[1][:1])
    rig.allocator.compact()
    second = rig.translator.build_index_table(rig.batch(), into=tables)
    assert (tables.full != before).any(), "the test moved nothing"
    assert addresses == (first.full.ids.data_ptr(), first.window.ids.data_ptr())
    assert addresses == (second.full.ids.data_ptr(), second.window.ids.data_ptr())


def test_only_the_owner_translates():
    rig = Rig("unified", (9,))
    foreign = tiny.allocator("unified", tiny.geometry()).pool
    draft = KVIndexTranslator(pool=foreign, allocator=rig.allocator, req_to_token=rig.req_to_token)
    assert not draft.is_translating
    ids = VirtualIds(torch.tensor([7]))
    assert draft.write_loc(ids).tensor is ids.tensor
    assert rig.translator.is_translating


def test_export_names_the_bytes_after_compaction():
    rig = Rig("unified", (9, 13))
    virtual = torch.tensor([page * 4 for page in rig.pages[1]])
    for kind in KVKind:
        with pytest.raises(InvariantError, match="moves held False != True"):
            rig.translator.export_ids(VirtualIds(virtual), kind)
        with rig.allocator.hold_moves():
            exported = rig.translator.export_ids(VirtualIds(virtual), kind).tensor
        span = rig.allocator._span(kind)
        assert exported.tolist() == [int(span.map.host[page]) * 4 for page in rig.pages[1]]
        assert exported.tolist() != virtual.tolist()


def test_a_row_is_cut_at_the_tables_width():
    rig = Rig("unified", (20, 20))
    table = torch.full((2, 2), -7, dtype=torch.int32)
    rig.translator.fill_read_table(rig.batch(), KVKind.FULL, table)
    assert table.tolist() == [[rig.entry(KVKind.FULL, page) for page in pages[:2]] for pages in rig.pages]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"query_lens": [0]}, "query_lens"),
        ({"seq_lens": [-3]}, "query_lens"),
        ({"query_lens": [2], "seq_lens": [4]}, "query_lens"),
        ({"req_rows": []}, "batch"),
        ({"virtual_write_ids": VirtualIds(torch.zeros(2, dtype=torch.int64))}, "virtual_write_ids"),
    ],
)
def test_bad_batches_are_refused(change, field):
    rig = Rig("unified", (5,))
    good = {
        "mode": ForwardMode.EXTEND,
        "input_ids": [1],
        "req_rows": [1],
        "seq_lens": [5],
        "query_lens": [1],
        "virtual_write_ids": VirtualIds(torch.zeros(1, dtype=torch.int64)),
        "translator": rig.translator,
    }
    with pytest.raises(InputError, match=f"^{field}: got"):
        ForwardBatch.create(**(good | change))
    ForwardBatch.create(**good)
