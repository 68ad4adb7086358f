"""Every backend on both pools: prefill, chunked prefill and decode against dense attention, moves in between."""

import pytest
import torch

from suite.errors import UnequalRowsError
from suite.kernels.batch import ForwardMode
from suite.kernels.ops import extend_attention
from tests.attention_rig import Rig

CPU = [
    ("reference", "reference"),
    ("triton", "reference"),
    ("triton", "interpreter"),
    ("fa3", "reference"),
    ("fa4", "reference"),
    ("flashinfer", "reference"),
]
BACKENDS = pytest.mark.parametrize(("backend", "launcher"), CPU, ids=["-".join(pair) for pair in CPU])
MODES = pytest.mark.parametrize("mode", ["static", "unified", "unified_token_major"])
W = 20


def edges(page_size: int) -> list[int]:
    """Lengths around one page, two pages and the window."""
    around = {page_size - 1, page_size, page_size + 1, 2 * page_size + 1, W - 1, W, W + 1}
    return sorted(around - {0})


@BACKENDS
@MODES
@pytest.mark.parametrize("page_size", [1, 16])
def test_serves_ragged_requests_through_moves(backend, launcher, mode, page_size):
    lengths = edges(page_size)
    rig = Rig(mode, backend, launcher, page_size, window=W, requests=len(lengths) + 1)
    decoy = len(lengths) + 1
    work = {decoy: 30} | dict(enumerate(lengths, 1))
    rig.step(work, mode=ForwardMode.EXTEND).assert_earned()
    rig.release(decoy)  # its pages become holes below everybody else's
    assert (rig.move() > 0) is (mode != "static")
    del work[decoy]
    rig.step(dict.fromkeys(work, 1)).assert_earned()
    rig.step(dict.fromkeys(reversed(work), 1)).assert_earned()


@BACKENDS
@MODES
def test_chunked_prefill_equals_the_whole(backend, launcher, mode):
    rig = Rig(mode, backend, launcher, window=10)
    rig.step({1: 7, 2: 30}).assert_earned()
    rig.step({2: 5, 3: 1, 1: 26}).assert_earned()
    rig.release(2)
    rig.move()
    rig.step({3: 33, 1: 1, 4: 2}).assert_earned()


@pytest.mark.parametrize("mode", ["static", "unified", "unified_token_major"])
@pytest.mark.parametrize(
    "shape",
    [
        {"window": None, "sinks": False},
        {"sinks": False, "q_heads": 3, "kv_heads": 1, "head_dim": 24},
        {"dtype": torch.bfloat16, "q_heads": 8, "kv_heads": 1},
        {"q_heads": 2, "kv_heads": 2, "window": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("tile", [16, None], ids=["small_tiles", "one_tile"])
def test_triton_shapes(monkeypatch, mode, shape, tile):
    if tile:  # many tiles a request, as on a GPU
        monkeypatch.setattr(extend_attention, "tile_rows", lambda rows, head_dim: tile)
    rig = Rig(mode, "triton", "interpreter", **shape)
    rig.step({1: 9, 2: 26}).assert_earned()
    rig.step({2: 1, 1: 1}).assert_earned()
    rig.step({1: 3, 2: 1}).assert_earned()


@pytest.mark.parametrize("splits", [2, 3, 7])
def test_triton_merges_splits(splits, monkeypatch):
    # a stream of 128 keys or fewer is one block: later splits stay empty, and their scratch is never read
    rig = Rig("unified", "triton", "interpreter", context=400, requests=3)
    monkeypatch.setattr(rig.attention, "decode_splits", lambda layer, batch, queries: splits)
    rig.step({1: 300, 2: 5, 3: 129}).assert_earned()
    rig.step({1: 1, 2: 1, 3: 1}).assert_earned()


@BACKENDS
def test_pools_agree_to_the_bit(backend, launcher):
    """A backend's answer depends on K and V, never on where they lie."""
    rigs = [Rig("static", backend, launcher, poison=False), Rig("unified", backend, launcher)]
    for rig in rigs:
        rig.step({4: 20, 1: 13, 2: 40})
        rig.release(4)
        rig.move()
    for work in ({1: 6, 2: 1}, {1: 1, 2: 1}):
        one, other = (rig.step(work) for rig in rigs)
        for layer in one.out:
            assert torch.equal(one.out[layer], other.out[layer]), f"layer {layer}"


@pytest.mark.parametrize(("backend", "launcher"), [("reference", "reference"), ("triton", "interpreter")])
@pytest.mark.parametrize("mode", ["static", "unified_token_major"])
def test_values_may_be_narrower_or_wider_than_keys(backend, launcher, mode):
    """Rows of unequal width, where the layout allows them; the page-major pool refuses them."""
    for v_head_dim in (8, 32):
        rig = Rig(mode, backend, launcher, 4, window=W, v_head_dim=v_head_dim)
        rig.step({3: 30, 1: 9, 2: W + 7}, mode=ForwardMode.EXTEND).assert_earned()
        rig.release(3)
        assert (rig.move() > 0) is (mode != "static")
        rig.step({1: 1, 2: 1}).assert_earned()


def test_the_page_major_pool_refuses_unequal_rows():
    with pytest.raises(UnequalRowsError, match=r"full.v_row_bytes: got 64, expected 128"):
        Rig("unified", "reference", "reference", 4, v_head_dim=8)
