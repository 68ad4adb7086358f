"""The translations: Triton kernels (interpreted) and torch twins against a formula in plain Python."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from suite.errors import InputError
from suite.kernels.ops import read_stream as stream_module
from suite.kernels.ops import read_table as table_module
from suite.kernels.ops.read_stream import read_stream, read_stream_torch, read_stream_triton
from suite.kernels.ops.read_table import TableCut, read_table, read_table_torch, read_table_triton
from suite.kernels.ops.write_loc import write_loc, write_loc_torch, write_loc_triton

KEPT = -77  # what the caller had there before
FEW = settings(max_examples=100, deadline=None)
PAGE_SIZES = st.sampled_from([1, 3, 4, 16])
MULTIPLIERS = st.sampled_from([1, 2, 6])
INTEGERS = st.sampled_from([torch.int32, torch.int64])


@pytest.fixture(autouse=True, scope="module")
def short_blocks():
    """Blocks of 4 columns and few programs, so that small cases loop as large ones do on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ONE_TOKEN_PAGES", "LONGER_PAGES"):
            patch.setattr(table_module, name, TableCut(block=4, programs=4))
        patch.setattr(stream_module, "BLOCK", 4)
        patch.setattr(stream_module, "PROGRAMS", 4)
        yield


def page_maps(pages: int):
    """Physical pages in any order, tombstones among them; the last row is -1 forever."""
    mapped = st.lists(st.integers(-1, 40), min_size=pages, max_size=pages)
    return mapped.map(lambda values: torch.tensor([0, *values, -1]))


def page_entry(token: int, page_map: torch.Tensor | None, multiplier: int, page_size: int) -> int:
    page = token // page_size  # floor: -1 lies in page -1
    if page < 0:
        return 0
    if page_map is not None:
        page = int(page_map[page]) if page < len(page_map) else -1
    return max(page, 0) * multiplier


@st.composite
def tables(draw):
    page_size, context = draw(PAGE_SIZES), draw(st.integers(1, 40))
    page_map = draw(st.none() | page_maps(draw(st.integers(1, 12))))
    tokens = st.lists(st.integers(-20, 14 * page_size), min_size=context, max_size=context)
    req_to_token = torch.tensor(draw(st.lists(tokens, min_size=3, max_size=3)), dtype=draw(INTEGERS))
    rows = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
    lens = draw(st.lists(st.integers(0, context), min_size=len(rows), max_size=len(rows)))
    width = draw(st.integers(1, 45))
    return req_to_token, rows, lens, page_map, draw(MULTIPLIERS), page_size, width, draw(INTEGERS)


@FEW
@given(tables())
def test_read_table(case):
    req_to_token, rows, lens, page_map, multiplier, page_size, width, dtype = case
    expected = torch.full((len(rows) + 1, width), KEPT, dtype=dtype)
    for r, (row, length) in enumerate(zip(rows, lens, strict=True)):
        for column in range(min(width, -(-length // page_size))):
            token = int(req_to_token[row, column * page_size])
            expected[r, column] = page_entry(token, page_map, multiplier, page_size)
    rest = (req_to_token, torch.tensor(rows), torch.tensor(lens, dtype=torch.int32), page_map, multiplier, page_size)
    small = None if page_map is None else page_map.int()
    other_cut = TableCut(block=8, programs=2, warps=8, keeps_map=True)
    triton = read_table_triton
    for fill, more in ((read_table_torch, ()), (triton, (max(lens),)), (triton, (1,)), (triton, (1, other_cut))):
        out = torch.full_like(expected, KEPT)
        fill(out, *rest, *more)
        assert torch.equal(out, expected), fill.__name__
    out = torch.full_like(expected, KEPT)
    triton(out, *rest[:3], small, *rest[4:], max(lens))
    assert torch.equal(out, expected), "an int32 page map"


@st.composite
def streams(draw):
    page_size, columns = draw(PAGE_SIZES), draw(st.integers(1, 12))
    entries = st.lists(st.integers(-3, 90), min_size=columns, max_size=columns)
    ids = torch.tensor(draw(st.lists(entries, min_size=3, max_size=3)), dtype=draw(INTEGERS))
    rows = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
    starts = [draw(st.integers(0, columns * page_size - 1)) for _ in rows]
    lengths = [draw(st.integers(0, columns * page_size + 3 - start)) for start in starts]
    return ids, rows, page_size, starts, lengths, draw(st.integers(-4, 4)), draw(INTEGERS)


@FEW
@given(streams())
def test_read_stream(case):
    ids, rows, page_size, starts, lengths, slack, dtype = case
    indptr = [0]
    for length in lengths:
        indptr.append(indptr[-1] + length)
    flat = []
    for row, start, length in zip(rows, starts, lengths, strict=True):
        for position in range(start, start + length):
            column = position // page_size
            entry = max(int(ids[row, column]), 0) if column < ids.shape[1] else 0
            flat.append(entry * page_size + position % page_size)
    capacity = max(0, indptr[-1] + slack)
    expected = torch.full((capacity + 16,), KEPT, dtype=dtype)  # the last 16 are somebody else's
    kept = min(len(flat), capacity)
    expected[:kept] = torch.tensor(flat[:kept], dtype=dtype)
    rest = (ids, torch.tensor(rows), page_size, torch.tensor(starts, dtype=torch.int32), torch.tensor(indptr))
    for fill, more in ((read_stream_torch, ()), (read_stream_triton, (max(lengths),)), (read_stream_triton, (1,))):
        out = torch.full_like(expected, KEPT)
        fill(out[:capacity], *rest, *more)
        assert torch.equal(out, expected), fill.__name__


@FEW
@given(st.data(), PAGE_SIZES, MULTIPLIERS, INTEGERS)
def test_write_loc(data, page_size, multiplier, dtype):
    page_map = data.draw(page_maps(6))
    virtual = torch.tensor(data.draw(st.lists(st.integers(-20, 10 * page_size), max_size=30)), dtype=dtype)
    expected = []
    for token in virtual.tolist():
        page = token // page_size
        physical = int(page_map[page]) if 0 <= page < len(page_map) else -1
        expected.append(0 if physical < 0 else physical * multiplier * page_size + token % page_size)
    for translate in (write_loc_torch, write_loc_triton):
        got = translate(virtual, page_map, multiplier, page_size)
        assert got.dtype == torch.int64
        assert got.tolist() == expected, translate.__name__


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_minus_one_is_the_sink(page_size):
    # truncating division puts -1 in page 0, and at page size 1 in the row before the map
    page_map = torch.tensor([5, 6, -1])
    tokens = torch.tensor([[-1] * 2 * page_size], dtype=torch.int32)
    for fill in (read_table_torch, read_table_triton):
        out = torch.full((1, 2), KEPT, dtype=torch.int32)
        more = () if fill is read_table_torch else (2 * page_size,)
        fill(out, tokens, torch.tensor([0]), torch.tensor([2 * page_size]), page_map, 4, page_size, *more)
        assert out.tolist() == [[0, 0]], fill.__name__
    for translate in (write_loc_torch, write_loc_triton):
        assert translate(torch.tensor([-1]), page_map, 4, page_size).tolist() == [0], translate.__name__


def test_ids_past_int32_survive():
    page_map = torch.tensor([0, 2**33, -1])
    for translate in (write_loc_torch, write_loc_triton):
        assert translate(torch.tensor([5], dtype=torch.int32), page_map, 8, 4).tolist() == [2**33 * 32 + 1]
    ids = torch.tensor([[2**33]])
    for fill, more in ((read_stream_torch, ()), (read_stream_triton, (4,))):
        out = torch.zeros(4, dtype=torch.int64)
        fill(out, ids, torch.tensor([0]), 4, torch.tensor([0]), torch.tensor([0, 4]), *more)
        assert out.tolist() == [2**35 + i for i in range(4)], fill.__name__


def test_bad_input_is_named():
    out, table = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 8, dtype=torch.int32)
    rows, lens, page_map = torch.tensor([0, 1]), torch.tensor([8, 8]), torch.tensor([0, 1, -1])
    with pytest.raises(InputError, match="page_size: got 0"):
        read_table(out, table, rows, lens, page_map, 1, 0, 8)
    with pytest.raises(InputError, match=r"seq_lens: got \(1,\)"):
        read_table(out, table, rows, lens[:1], page_map, 1, 4, 8)
    with pytest.raises(InputError, match=r"out: got \(1, 3\), expected at least 2 rows"):
        read_table(out[:1], table, rows, lens, page_map, 1, 4, 8)
    with pytest.raises(InputError, match="req_to_token"):
        read_table(out, table.T, rows, lens, page_map, 1, 4, 8)
    with pytest.raises(InputError, match="page_size: got -1"):
        write_loc(lens, page_map, 1, -1)
    stream, indptr = torch.zeros(16, dtype=torch.int32), torch.tensor([0, 8, 16])
    with pytest.raises(InputError, match="entry_page_size: got 0"):
        read_stream(stream, table, rows, 0, rows, indptr, 8)
    with pytest.raises(InputError, match=r"starts: got \(1,\)"):
        read_stream(stream, table, rows, 1, rows[:1], indptr, 8)
    with pytest.raises(InputError, match=r"indptr: got \(2,\), expected \(3,\)"):
        read_stream(stream, table, rows, 1, rows, indptr[:2], 8)
    with pytest.raises(InputError, match="out: got"):
        read_stream(stream.view(4, 4), table, rows, 1, rows, indptr, 8)
    with pytest.raises(InputError, match="ids: got"):
        read_stream(stream, table.T, rows, 1, rows, indptr, 8)
