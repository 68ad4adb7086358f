"""Byte arithmetic against a second derivation, and every guard by name."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from suite.errors import InputError, PageMapRangeError, PoolTooSmallError, UnequalRowsError
from suite.kernels.geometry import KVGeometry, RunnerGeometry, bytes_for_pages
from suite.kernels.ids import KernelIds, KVKind
from suite.kernels.pools.layout import plan_buffer
from suite.kernels.pools.static import StaticPool
from suite.kernels.pools.unified import TokenMajorPool, UnifiedPool
from tests import tiny


def test_gpt_oss_20b_bytes():
    # 12 full and 12 window layers of 8 x 64 in bf16: 24,576 bytes a token each
    pool = KVGeometry(
        kind=KVKind.FULL, layers=tuple(range(12)), kv_heads=8, head_dim=64, dtype=torch.bfloat16, page_size=16
    )
    assert pool.k_row_bytes == 1024
    for mode in ("static", "unified", "unified_token_major"):
        assert pool.entry_bytes(mode) == 24_576
        assert pool.page_bytes(mode) == 393_216
    assert pool.blocks_per_page == 24


@given(
    page_size=st.sampled_from([1, 4, 16]),
    full=st.integers(1, 3),
    window=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    data=st.data(),
)
def test_views_obey_the_byte_law(page_size, full, window, dtype, data):
    """Row (page, offset) of a layer's K lies at page * page_bytes + (2 * n * page_size + offset) * row_bytes."""
    shape = tiny.geometry(page_size, full, window, dtype)
    pool = UnifiedPool(shape, 64 * 1024, 8, "cpu")
    part = data.draw(st.sampled_from(shape.pools))
    n = data.draw(st.integers(0, len(part.layers) - 1))
    page = data.draw(st.integers(0, pool.num_pages(part.kind) - 1))
    offset = data.draw(st.integers(0, page_size - 1))
    row = page * pool.page_multiplier(part.kind) * page_size + offset
    start = pool._storage.data_ptr()
    for side, block in ((pool.k_view, 2 * n), (pool.v_view, 2 * n + 1)):
        got = side(part.layers[n])[row].data_ptr() - start
        assert got == page * part.page_bytes("unified") + (block * page_size + offset) * part.k_row_bytes
        assert got + part.k_row_bytes <= pool.buffer_bytes
        assert side(part.layers[n]).is_contiguous()


def test_every_row_of_a_page_belongs_to_one_layer_and_side():
    shape = tiny.geometry(4, 2, 3)
    pool = UnifiedPool(shape, 16 * 1024, 8, "cpu")
    for part in shape.pools:
        page = pool.spans[part.kind].min_page
        pool.zero_pages(part.kind, torch.tensor([page]))
        rows = slice(page * pool.page_multiplier(part.kind) * 4, page * pool.page_multiplier(part.kind) * 4 + 4)
        for stamp, layer in enumerate(part.layers, 1):
            pool.k_view(layer)[rows] = stamp
            pool.v_view(layer)[rows] = -stamp
        envelope = pool._envelopes(part.kind)[page].view(torch.float32).view(-1, 8)
        want = [sign * s for s in range(1, len(part.layers) + 1) for sign in (1.0, -1.0) for _ in range(4)]
        assert envelope[:, 0].tolist() == want


def test_views_never_move_and_span_the_buffer():
    shape = tiny.geometry()
    pool = UnifiedPool(shape, 16 * 1024, 8, "cpu")
    before = [pool.k_view(layer).data_ptr() for part in shape.pools for layer in part.layers]
    pool.move_pages(KVKind.FULL, torch.tensor([3, 4]), torch.tensor([7, 9]))
    assert before == [pool.k_view(layer).data_ptr() for part in shape.pools for layer in part.layers]
    for part in shape.pools:
        assert pool.num_pages(part.kind) == pool.buffer_bytes // part.page_bytes("unified")


@given(
    page_size=st.sampled_from([1, 4, 16]),
    full=st.integers(1, 3),
    window=st.integers(0, 3),
    widths=st.sampled_from([(8, None), (8, 16), (16, 4)]),
    data=st.data(),
)
def test_token_major_rows_obey_the_byte_law(page_size, full, window, widths, data):
    """Row t of a layer lies at t * entry + n * (k + v), its V right behind; a page's K by explicit strides."""
    shape = with_rows(layers=tuple(range(full)), page_size=page_size, head_dim=widths[0], v_head_dim=widths[1])
    if window and widths[1] is None:
        shape = tiny.geometry(page_size, full, window)
    pool = TokenMajorPool(shape, 64 * 1024, 8, "cpu")
    part = data.draw(st.sampled_from(shape.pools))
    n = data.draw(st.integers(0, len(part.layers) - 1))
    row = data.draw(st.integers(0, pool.num_pages(part.kind) * page_size - 1))
    exact = len(part.layers) * (part.k_row_bytes + part.v_row_bytes)
    entry = -(-exact // 32) * 32
    assert pool.page_bytes(part.kind) == page_size * entry
    for side, inside in ((pool.k_view, 0), (pool.v_view, part.k_row_bytes)):
        view = side(part.layers[n])
        at = row * entry + n * (part.k_row_bytes + part.v_row_bytes) + inside
        assert view[row].data_ptr() - pool._storage.data_ptr() == at
        paged = pool.paged(view)
        assert paged.shape[:2] == (pool.num_pages(part.kind), page_size)
        assert paged.stride(0) == page_size * view.stride(0)
        assert paged[row // page_size, row % page_size].data_ptr() == view[row].data_ptr()


@pytest.mark.parametrize("mode", ["static", "unified", "unified_token_major"])
@pytest.mark.parametrize("layers", [1, 3])
def test_latent_rows_hold_their_value(mode, layers):
    """One row per layer; the value is its head, not a copy. One layer is a pool like any other."""
    latent = KVGeometry(
        kind=KVKind.FULL,
        layers=tuple(range(layers)),
        kv_heads=1,
        head_dim=24,
        v_head_dim=16,
        is_latent=True,
        dtype=torch.float32,
        page_size=4,
    )
    assert latent.entry_bytes("unified") == layers * 96
    assert latent.blocks_per_page == layers
    allocator = tiny.allocator(mode, RunnerGeometry(full=latent), pages=30)
    pool = allocator.pool
    pages = allocator.alloc(3)
    assert pool.page_multiplier(KVKind.FULL) == (layers if mode == "unified" else 1)
    page_map = allocator.page_map(KVKind.FULL)
    at = pages[1] if page_map is None else int(page_map[pages[1]])
    row = at * pool.page_multiplier(KVKind.FULL) * 4 + 2
    for layer in range(layers):
        new = torch.randn(1, 1, 24)
        pool.write(layer, KernelIds(torch.tensor([row]), KVKind.FULL), new, None)
        assert torch.equal(pool.latent_view(layer)[row], new[0, 0])
        assert torch.equal(pool.v_view(layer)[row], new[0, :, :16])
        with pytest.raises(TypeError, match=f"write to layer {layer}: has no V rows"):
            pool.write(layer, KernelIds(torch.tensor([row]), KVKind.FULL), new, new)


def test_only_latent_layers_have_a_latent_view():
    pool = tiny.allocator("unified", tiny.geometry()).pool
    with pytest.raises(TypeError, match="layer 0 has K and V rows"):
        pool.latent_view(0)
    rows = torch.zeros(1, 1, 8)
    with pytest.raises(TypeError, match="write to layer 0: needs V rows"):
        pool.write(0, KernelIds(torch.tensor([4]), KVKind.FULL), rows, None)


def with_rows(v_head_dim: int | None = None, **changes) -> RunnerGeometry:
    full = dataclasses.replace(tiny.geometry().full, v_head_dim=v_head_dim, **changes)
    return RunnerGeometry(full=full)


def test_guards_name_the_field():
    with pytest.raises(UnequalRowsError, match=r"full.v_row_bytes: got 64, expected 32"):
        plan_buffer(with_rows(v_head_dim=16), "unified", 1 << 20, 8)
    huge = with_rows(head_dim=8, layers=tuple(range(64)), page_size=16)
    with pytest.raises(PageMapRangeError, match=r"full\.kernel_ids: got"):
        plan_buffer(huge, "unified", huge.full.k_row_bytes * (2**31 + 4096), 8)
    need = bytes_for_pages(tiny.geometry(), "unified", 16)
    with pytest.raises(PoolTooSmallError, match=r"buffer_bytes: got \d+, expected at least \d+ for the sink and one"):
        plan_buffer(tiny.geometry(), "unified", need - 4096, 64)
    plan_buffer(tiny.geometry(), "unified", need, 64)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"page_size": 0}, "page_size"),
        ({"kv_heads": -1}, "kv_heads"),
        ({"head_dim": 3}, "k_row_bytes"),
        ({"layers": ()}, "layers"),
        ({"window": 8}, "window"),
    ],
)
def test_bad_geometry_is_refused(change, field):
    with pytest.raises(InputError, match=f"^{field}: got"):
        with_rows(**change)


def test_pools_of_one_runner_agree():
    shape = tiny.geometry()
    with pytest.raises(InputError, match=r"window\.page_size: got 8, expected 4"):
        RunnerGeometry(full=shape.full, window=dataclasses.replace(shape.window, page_size=8))
    with pytest.raises(InputError, match=r"window\.layers"):
        RunnerGeometry(full=shape.full, window=dataclasses.replace(shape.window, layers=(1, 2)))


def test_a_static_pool_past_int32_is_refused_before_it_is_allocated():
    pages = {KVKind.FULL: 2**31 // 4 + 1, KVKind.WINDOW: 4}
    with pytest.raises(PageMapRangeError, match=r"full.kernel_ids: got 2147483652, expected at most 2147483647"):
        StaticPool(tiny.geometry(4), pages, "meta")
