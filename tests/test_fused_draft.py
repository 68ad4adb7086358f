"""A draft whose rows lie behind its host's: where they lie, who translates, and what does not fit."""

import dataclasses

import pytest
import torch

from suite.errors import InputError, UnequalRowsError
from suite.kernels.geometry import RunnerGeometry
from suite.kernels.ids import KVKind, VirtualIds
from suite.kernels.pools.layout import plan_buffer
from suite.kernels.pools.static import StaticPool
from suite.kernels.translator import KVIndexTranslator
from tests import tiny
from tests.pool_rig import COMPOSITIONS, LARGE_STATE, MODES, build

HOST, DRAFT = tiny.geometry(4, 2, 3), tiny.geometry(4, 1, 2)
FUSED = dataclasses.replace(HOST, draft=DRAFT)


def first_byte(pool, view: torch.Tensor, row: int) -> int:
    return view[row].data_ptr() - pool._storage.data_ptr()


def test_page_major_rows_lie_in_blocks_behind_the_hosts():
    pool = build("unified", FUSED).pool
    for kind, host_blocks, draft_layers in ((KVKind.FULL, 4, (0,)), (KVKind.WINDOW, 6, (1, 2))):
        blocks = host_blocks + 2 * len(draft_layers)
        assert pool.page_multiplier(kind) == pool.draft.page_multiplier(kind) == blocks
        assert pool.page_bytes(kind) == pool.draft.host.page_bytes(kind) == blocks * 4 * 32
        page, offset = 5, 3
        row = page * blocks * 4 + offset
        for n, layer in enumerate(draft_layers):
            for side, view in enumerate((pool.draft.k_view(layer), pool.draft.v_view(layer))):
                block = host_blocks + 2 * n + side
                assert first_byte(pool, view, row) == page * pool.page_bytes(kind) + (block * 4 + offset) * 32
                assert view.is_contiguous()


def test_token_major_rows_lie_behind_the_hosts_in_each_entry():
    """Rows of another width than the host's are welcome there; entries are padded to 32 bytes."""
    wide = RunnerGeometry(full=dataclasses.replace(DRAFT.full, kv_heads=3, v_head_dim=4))
    pool = build("unified_token_major", RunnerGeometry(full=HOST.full, draft=wide)).pool
    entry = -(-(2 * 64 + 3 * 32 + 3 * 16) // 32) * 32
    assert pool.page_bytes(KVKind.FULL) == 4 * entry == 4 * 288
    assert pool.page_multiplier(KVKind.FULL) == pool.draft.page_multiplier(KVKind.FULL) == 1
    assert first_byte(pool, pool.draft.k_view(0), 9) == 9 * entry + 128
    assert first_byte(pool, pool.draft.v_view(0), 9) == 9 * entry + 128 + 96
    assert pool.draft.v_view(0).shape == (pool.num_pages(KVKind.FULL) * 4, 3, 4)


@pytest.mark.parametrize("mode", MODES)
def test_a_fused_draft_reads_and_writes_through_its_hosts_maps(mode):
    """What the draft stored before a compaction it finds after it, at the ids that its own translator gives."""
    allocator = build(mode, FUSED)
    pool, table = allocator.pool, torch.zeros(2, 32, dtype=torch.int32)
    host, draft = (KVIndexTranslator(pool=each, allocator=allocator, req_to_token=table) for each in (pool, pool.draft))
    assert host.is_translating == draft.is_translating == (mode != "static")
    ballast, pages = allocator.alloc(3), allocator.alloc(2)
    ids = VirtualIds(torch.tensor([page * 4 + offset for page in pages for offset in range(4)]))
    new = {layer: torch.randn(8, 1, 8) for layer in (0, 1, 2)}
    for layer in (0, 1, 2):
        full, window = draft.write_loc(ids), draft.sliding_window_write_loc_for(ids)
        pool.draft.write(layer, full if layer == 0 else window, new[layer], -new[layer])
        host_rows = host.write_loc(ids) if layer < 2 else host.sliding_window_write_loc_for(ids)
        pool.write(layer, host_rows, torch.zeros(8, 1, 8), torch.zeros(8, 1, 8))
    allocator.free(ballast)
    before = draft.write_loc(ids).tensor
    allocator.compact()
    assert torch.equal(draft.write_loc(ids).tensor, before) == (mode == "static")
    assert torch.equal(draft.write_loc(ids).tensor, host.write_loc(ids).tensor)
    for layer in (0, 1, 2):
        at = (draft.write_loc(ids) if layer == 0 else draft.sliding_window_write_loc_for(ids)).tensor
        assert torch.equal(pool.draft.k_view(layer)[at], new[layer])
        assert torch.equal(pool.draft.v_view(layer)[at], -new[layer])


@pytest.mark.parametrize("mode", MODES)
def test_a_private_draft_that_borrows_the_allocator_passes_virtual_ids_through(mode):
    allocator = build(mode, FUSED)
    pages = dict.fromkeys(KVKind, allocator.virtual_pages)
    private = StaticPool(DRAFT, pages, "cpu")
    draft = KVIndexTranslator(pool=private, allocator=allocator, req_to_token=torch.zeros(2, 32, dtype=torch.int32))
    ids = VirtualIds(torch.tensor([4 * page for page in allocator.alloc(2)]))
    assert not draft.is_translating
    assert draft.write_loc(ids).tensor is ids.tensor
    assert draft.sliding_window_write_loc_for(ids).tensor is ids.tensor
    elsewhere = build(mode, FUSED).pool.draft  # fused, but with another host
    foreign = KVIndexTranslator(pool=elsewhere, allocator=allocator, req_to_token=draft.req_to_token)
    assert not foreign.owns_ids


@pytest.mark.parametrize("mode", MODES)
def test_freed_draft_rows_are_poisoned_and_bound_ones_clear(mode):
    allocator = build(mode, FUSED)
    (page,) = allocator.alloc(1)
    page_map = allocator.page_map(KVKind.FULL)
    at = page if page_map is None else int(page_map[page])
    row = at * allocator.pool.page_multiplier(KVKind.FULL) * 4
    assert not allocator.pool.draft.k_view(0)[row : row + 4].any()
    allocator.free([page])
    assert allocator.pool.draft.k_view(0)[row : row + 4].isnan().all()


def test_bytes_count_the_draft():
    for mode in MODES:
        fused, alone = build(mode, COMPOSITIONS["state + full, fused draft"]), build(mode, COMPOSITIONS["full"])
        for allocator in (fused, alone):
            allocator.alloc(2)
        assert fused.bytes_in_use()[KVKind.FULL] == 2 * alone.bytes_in_use()[KVKind.FULL]


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ({"kv_heads": 2}, r"draft\.full\.k_row_bytes: got 64, expected 32, the host's row"),
        ({"v_head_dim": 16}, r"draft\.full\.v_row_bytes: got 64, expected 32, the host's row"),
    ],
)
def test_page_major_refuses_unequal_rows(draft, message):
    full = dataclasses.replace(DRAFT.full, **draft)
    shape = RunnerGeometry(full=HOST.full, draft=RunnerGeometry(full=full))
    with pytest.raises(UnequalRowsError, match=message):
        plan_buffer(shape, "unified", 1 << 20, 8)
    plan_buffer(shape, "unified_token_major", 1 << 20, 8)


def test_a_draft_that_fits_no_host_is_refused():
    def fuse(draft: RunnerGeometry, host: RunnerGeometry = HOST) -> RunnerGeometry:
        return dataclasses.replace(host, draft=draft)

    with pytest.raises(InputError, match=r"draft\.full\.page_size: got 1, expected 4, as the host's rows"):
        fuse(tiny.geometry(1, 1, 0))
    with pytest.raises(InputError, match=r"draft\.full\.dtype: got torch\.bfloat16, expected torch\.float32"):
        fuse(tiny.geometry(4, 1, 0, dtype=torch.bfloat16))
    with pytest.raises(InputError, match=r"draft\.window: got \(1, 2\), expected no window layers"):
        fuse(DRAFT, tiny.geometry(4, 2, 0))
    far = dataclasses.replace(DRAFT, window=dataclasses.replace(DRAFT.window, window=9))
    with pytest.raises(InputError, match=r"draft\.window: got 9, expected at most 8"):
        fuse(far)
    for bad in (dataclasses.replace(DRAFT, state=LARGE_STATE), FUSED):
        with pytest.raises(InputError, match="draft: got 'recurrent state or a draft of its own'"):
            fuse(bad)
