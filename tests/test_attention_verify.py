"""Verify as a forward of its own: as many new tokens for every request, eager and captured, on every pool."""

import pytest
import torch

from suite.errors import InputError
from suite.kernels.batch import ForwardMode
from suite.kernels.ids import KVKind
from suite.kernels.ops import decode_attention
from tests.attention_rig import Rig
from tests.mla_rig import LatentRig
from tests.test_attention_backends import CPU, MODES, W
from tests.test_attention_metadata import tensors
from tests.test_attention_mla import CASES, ORACLE

VERIFY = ForwardMode.VERIFY
D = 4
# rows start on, before and past page and window borders, so that the new tokens cross each
MHA = [(Rig, name, size) for name, launcher in CPU if launcher == ORACLE for size in (1, 16)]
MHA.append((Rig, "trtllm_mha", 16))
MLA = [(LatentRig, name, size) for name, launcher, size in CASES if launcher == ORACLE and name != ORACLE]
BACKENDS = pytest.mark.parametrize(
    ("family", "backend", "page_size"),
    [*MHA, *MLA],
    ids=[f"{family.__name__}-{name}-{size}" for family, name, size in [*MHA, *MLA]],
)


def make(mode: str, family: type[Rig], backend: str, page_size: int, launcher: str = ORACLE, **more) -> Rig:
    """A rig whose forwards run two layers: with a window, one of each kind."""
    window = W if family is Rig else None
    context = max(96, 4 * page_size)
    rig = family(mode, backend, launcher, page_size, window=window, context=context, **more)
    rig.layers = rig.layers[:2]
    return rig


def borders(page_size: int) -> list[int]:
    """Lengths from which D new tokens cross a page, a second page or the window, and which no page divides."""
    starts = {page_size - 1, page_size, page_size + 1, 2 * page_size - 2, 2 * page_size + 1, W - 2, W, W + 1}
    return sorted(starts - {0, -1})


@BACKENDS
@MODES
def test_captured_verifies_equal_dense_attention_and_the_eager_ones(family, backend, page_size, mode):
    lengths = borders(page_size)
    lanes = len(lengths) + 1
    rig, eager = (make(mode, family, backend, page_size, requests=lanes) for _ in range(2))
    rig.attention.capture(lanes, D)
    work = {lanes: 30} | dict(enumerate(lengths, 1))
    for one in (rig, eager):
        one.step(work)
        one.release(lanes)  # its pages become holes below everybody else's
        assert (one.move() > 0) is (mode != "static")
    del work[lanes]
    known: dict = {}
    for rows in (list(work), list(reversed(work))):
        drafts = dict.fromkeys(rows, D)
        step = rig.step(drafts, mode=VERIFY, pad_to=lanes, replay=True)
        expected = eager.step(drafts, mode=VERIFY, pad_to=lanes)
        step.assert_earned()
        expected.assert_earned()
        for layer in step.out:
            assert torch.equal(step.out[layer], expected.out[layer]), f"layer {layer}"
        known = known or tensors(step.metadata)
        for name, now in tensors(step.metadata).items():
            assert now.data_ptr() == known[name].data_ptr(), f"{name} was rebound"
            assert now.shape == known[name].shape, f"{name} changed its shape"


@BACKENDS
def test_decodes_and_verifies_take_turns_in_the_same_buffers(family, backend, page_size):
    """What one mode leaves in the buffers, the other does not read; sink padding of either writes nothing live."""
    rig = make("unified", family, backend, page_size)
    rig.attention.capture(4, D)
    rig.step({1: 13, 2: 40, 3: 8, 4: 22})
    for new in (1, D, 1, D):
        for work in (dict.fromkeys((1, 2, 3, 4), new), dict.fromkeys((3, 1), new)):
            mode = VERIFY if new == D else ForwardMode.DECODE
            step = rig.step(work, mode=mode, pad_to=len(work), replay=True)
            step.assert_earned()
            assert step.metadata.mode is mode
            ids = rig.attention.captured.write_ids
            stable = ids[KVKind.FULL] if isinstance(ids, dict) else ids
            assert stable[: len(work) * new].all()
            assert not stable[len(work) * new :].any(), "a larger batch's ids would still be live"
        rig.move()


@MODES
@pytest.mark.parametrize("family", [Rig, LatentRig])
def test_our_kernels_verify(mode, family):
    rig, eager = (make(mode, family, "triton", 4, "interpreter", requests=3) for _ in range(2))
    rig.attention.capture(3, D)
    for one in (rig, eager):
        one.step({1: 6, 2: 30, 3: 10})
        one.release(1)
        one.move()
    step = rig.step({3: D, 2: D}, mode=VERIFY, pad_to=3, replay=True)
    expected = eager.step({3: D, 2: D}, mode=VERIFY, pad_to=3)
    step.assert_earned()
    for layer in step.out:
        assert torch.equal(step.out[layer], expected.out[layer]), f"layer {layer}"


@pytest.mark.parametrize(("tile", "splits"), [(16, 1), (16, 3), (512, 3)])
@pytest.mark.parametrize("shape", [{"q_heads": 6, "kv_heads": 2}, {"q_heads": 8, "kv_heads": 1, "window": 3}], ids=str)
def test_triton_verifies_in_tiles_and_splits(monkeypatch, shape, tile, splits):
    """Several tiles of queries, splits that a query sees nothing of, windows shorter than the draft."""
    cut = decode_attention.tiles_of

    def tiles_of(groups: int, queries: int) -> tuple[int, int, int]:
        lanes, rows, tiles = cut(groups, queries)
        return (lanes, tile, -(-queries // (tile // lanes))) if queries > 1 else (lanes, rows, tiles)

    monkeypatch.setattr(decode_attention, "tiles_of", tiles_of)
    rig = Rig("unified", "triton", "interpreter", context=200, requests=2, **shape)
    rig.layers = rig.layers[:2]
    monkeypatch.setattr(rig.attention, "decode_splits", lambda layer, batch, queries: splits)
    rig.step({1: 2, 2: 124})  # blocks of 128 keys: the drafts cross a border
    rig.step({1: 7, 2: 7}, mode=VERIFY).assert_earned()


def test_verify_batches_are_checked():
    rig = LatentRig("static", "fa3", "reference", 1)
    rig.step({1: 3, 2: 3})
    with pytest.raises(InputError, match=r"query_lens: got \(2, 3\), expected as many for every request of a verify"):
        rig.batch({1: 2, 2: 3}, mode=VERIFY)
    with pytest.raises(InputError, match=r"draft_tokens: got 0, expected a positive number"):
        rig.attention.capture(2, 0)
    rig.attention.capture(2, D)
    with pytest.raises(InputError, match=r"query_lens: got 3, expected 4, the captured draft tokens"):
        rig.attention.replay(rig.batch({1: 3, 2: 3}, mode=VERIFY))
    with pytest.raises(InputError, match=r"batch.mode: got 'extend', expected decode or verify"):
        rig.attention.replay(rig.batch({1: 4, 2: 4}))
