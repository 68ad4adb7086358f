"""Our own MLA kernel against its twin: splits, tiles, heads, widths; and what the Triton backend refuses of MLA."""

import dataclasses
import re
from itertools import accumulate, pairwise

import pytest
import torch

from suite.errors import InputError
from suite.kernels.attention import triton as triton_backend
from suite.kernels.attention.support import backend_class
from suite.kernels.geometry import AttentionLayer, KVGeometry, RunnerGeometry
from suite.kernels.ids import KVKind
from suite.kernels.ops import bench_mla, mla_tiles
from suite.kernels.ops.mla_decode import mla_attention, mla_attention_torch
from suite.kernels.ops.mla_tiles import MlaTile, programs_per_split
from tests.mla_rig import LatentRig, absorbed

LATENT, ROPE = 32, 16
SCALE = (LATENT + ROPE) ** -0.5


def inputs(query_lens: list[int], seq_lens: list[int], q_heads: int, width: int = LATENT + ROPE) -> tuple:
    """q, strided rows of which only those in the stream are not NaN, and the CSR of a random order of rows."""
    generator = torch.Generator().manual_seed(sum(seq_lens) + q_heads)
    rows = torch.full((2 * sum(seq_lens), 2, width), torch.nan)[:, 1]
    indices = torch.randperm(rows.shape[0] - 1, generator=generator)[: sum(seq_lens)] + 1
    rows[indices] = torch.randn(sum(seq_lens), width, generator=generator)
    q = torch.randn(sum(query_lens), q_heads, width, generator=generator)
    offsets, indptr = (torch.tensor([0, *accumulate(lens)]).int() for lens in (query_lens, seq_lens))
    return q, rows, offsets, indptr, indices.int()


def assert_as_twin(query_lens, seq_lens, q_heads, splits, tile=None, latent=LATENT, rope=ROPE) -> None:
    """Error against fp64 <= 2x that of the fp32 twin with its sums in another order, plus a rounding."""
    arguments = inputs(query_lens, seq_lens, q_heads, latent + rope)
    out = mla_attention(*arguments, latent, (latent + rope) ** -0.5, max(query_lens), splits, tile)
    q, rows, *streams = arguments
    exact = absorbed_all(q, rows, streams, latent, torch.float64)
    rough = absorbed_all(q, rows, streams, latent, torch.float32)
    floor = torch.finfo(torch.float32).eps * rows.nan_to_num().abs().max()
    assert (out - exact).abs().max() <= 2 * (rough - exact).abs().max() + floor


def absorbed_all(q, rows, streams, latent: int, dtype: torch.dtype) -> torch.Tensor:
    """Every request by the rig's plain maths."""
    layer = AttentionLayer(
        index=0,
        q_heads=q.shape[1],
        kv_heads=1,
        head_dim=q.shape[2],
        scale=q.shape[2] ** -0.5,
        v_head_dim=latent,
        is_latent=True,
    )
    offsets, indptr, indices = (stream.tolist() for stream in streams)
    bounds = zip(pairwise(offsets), pairwise(indptr), strict=True)
    parts = [absorbed(q[a:b], rows[indices[c:d]], layer, dtype) for (a, b), (c, d) in bounds]
    return torch.cat(parts)


def test_the_twin():
    arguments = inputs([3, 1], [20, 9], 4)
    twin = mla_attention_torch(*arguments, LATENT, SCALE)
    exact, rough = (
        absorbed_all(*arguments[:2], arguments[2:], LATENT, dtype) for dtype in (torch.float64, torch.float32)
    )
    floor = torch.finfo(torch.float32).eps * exact.abs().max()
    assert (twin - exact).abs().max() <= 2 * (rough - exact).abs().max() + floor


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [([1, 1, 1], [5, 300, 129]), ([3, 1, 9], [3, 300, 128]), ([4, 4], [4, 257])],
    ids=["decode", "extend", "verify"],
)
def test_splits(query_lens, seq_lens, splits):
    # a stream of 128 keys or fewer is one block: later splits stay empty, and their scratch is never read
    assert_as_twin(query_lens, seq_lens, 4, splits)


@pytest.mark.parametrize("splits", [1, 3])
def test_keys_first(splits):
    tile = MlaTile(rows=16, keys=64, warps=4, stages=3, keys_first=True)
    assert_as_twin([1, 1, 1], [5, 300, 129], 16, splits, tile)
    assert_as_twin([4, 2], [4, 257], 4, splits, tile)


@pytest.mark.parametrize("q_heads", [1, 3, 16, 80, 128])
@pytest.mark.parametrize("query_lens", [[1, 1], [5, 2]], ids=["decode", "extend"])
def test_heads(q_heads, query_lens):
    assert_as_twin(query_lens, [40, 7], q_heads, 1)


@pytest.mark.parametrize("keys_first", [False, True], ids=["queries_first", "keys_first"])
@pytest.mark.parametrize("rows", [16, 64])
def test_many_tiles_a_request(rows, keys_first):
    tile = MlaTile(rows=rows, keys=32, warps=4, stages=2, keys_first=keys_first)
    assert_as_twin([13, 1, 6], [13, 50, 40], 16, 2, tile)


@pytest.mark.parametrize(("latent", "rope"), [(16, 16), (64, 16), (512, 64)])
def test_widths(latent, rope):
    assert_as_twin([1, 2], [20, 33], 16, 2, latent=latent, rope=rope)


def test_bf16_rows_are_served():
    rig = LatentRig(
        "unified", "triton", "interpreter", q_heads=16, dtype=torch.bfloat16, context=520, requests=2, depth=1
    )
    rig.step({1: 500, 2: 3}).assert_earned()
    assert rig.attention.latent_splits(rig.layers[0], 2, 1) == 2
    rig.step({1: 1, 2: 1}).assert_earned()
    rig.step({1: 4, 2: 4}).assert_earned()


@pytest.mark.parametrize(("latent", "rope"), [(24, 16), (8, 16), (32, 0)])
def test_widths_that_no_tile_takes(latent, rope):
    with pytest.raises(InputError, match=r"_dim: got \d+, expected a power of two, at least 16"):
        mla_attention(*inputs([1], [3], 2, latent + rope), latent, SCALE, 1, 1)


def test_every_tile_fits_what_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(mla_tiles, "INTERPRETED", False)
    expected = {(16, 1): 1, (128, 1): 2, (16, 4): 1, (16, 5): 2, (3, 2): 1, (128, 3): 6, (64, 100): 100}
    for (q_heads, queries), programs in expected.items():
        assert programs_per_split(q_heads, queries) == programs
        tile = mla_tiles.tile_for(q_heads, queries)
        lanes = mla_tiles.lanes_of(q_heads)
        assert tile.rows % lanes == 0 or lanes < tile.rows
        assert tile.rows <= mla_tiles.MAX_TILE


def test_splits_follow_sizes_and_not_lengths(monkeypatch):
    rig = LatentRig("static", "triton", "interpreter", q_heads=16, context=4096, requests=1)
    monkeypatch.setattr(triton_backend, "INTERPRETED", False)
    monkeypatch.setattr(mla_tiles, "INTERPRETED", False)
    monkeypatch.setattr(triton_backend, "_multiprocessors", lambda device: 132)
    found = [rig.attention.latent_splits(rig.layers[0], batch, 1) for batch in (1, 32, 64, 300)]
    assert found == [16, 8, 4, 1]  # 16: no split under 256 tokens
    assert rig.attention.latent_splits(rig.layers[0], 4, 2048) == 1


@pytest.mark.parametrize(
    ("change", "launcher", "reason"),
    [
        ({}, "interpreter", None),
        ({"head_dim": 1088, "v_head_dim": 1024}, "interpreter", "two powers of two from 16 to 512 .* got 1024 . 64"),
        ({"head_dim": 560}, "interpreter", "two powers of two from 16 to 512 . 64, got 512 . 48"),
        ({"dtype": torch.int8}, "interpreter", "needs torch.float16 or .* got torch.int8"),
        ({"dtype": torch.float32}, "native", "needs torch.float16 or torch.bfloat16 .* got torch.float32"),
    ],
)
def test_the_triton_backend_says_what_it_needs(change, launcher, reason):
    full = KVGeometry(
        kind=KVKind.FULL, layers=(0,), kv_heads=1, head_dim=576, v_head_dim=512, dtype=torch.bfloat16, page_size=1,
        is_latent=True,
    )  # fmt: skip
    geometry = RunnerGeometry(full=dataclasses.replace(full, **change))
    got = backend_class("triton").refusal(geometry, "unified", "cpu", launcher, False)
    assert (got is None) if reason is None else re.search(reason, got), got


def test_bench_needs_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_mla.main([]) == InputError.exit_code
    assert "an NVIDIA GPU: MLA decode is timed with CUDA events" in capsys.readouterr().err
