"""Every MLA backend on every pool: forwards against absorbed attention through moves, captured and to the bit."""

import pytest
import torch

from suite.kernels.attention.reference import execute
from suite.kernels.batch import ForwardMode
from tests.mla_rig import MODES, LatentRig
from tests.test_attention_metadata import tensors

ORACLE = "reference"
CASES = [
    (ORACLE, ORACLE, 4),
    ("triton", ORACLE, 1),
    ("triton", "interpreter", 1),
    ("triton", "interpreter", 16),
    ("fa3", ORACLE, 1),
    ("fa3", ORACLE, 16),
    ("flashinfer_mla", ORACLE, 1),
    ("flashinfer_mla", ORACLE, 12),
    ("trtllm_mla", ORACLE, 32),
    ("trtllm_mla", ORACLE, 64),
    ("cutedsl_mla", ORACLE, 32),
    ("tokenspeed_mla", ORACLE, 64),
    ("flashmla", ORACLE, 64),
]
NAMES = [f"{name}-{launcher}-{size}" for name, launcher, size in CASES]
BACKENDS = pytest.mark.parametrize(("backend", "launcher", "page_size"), CASES, ids=NAMES)
ALL_MODES = pytest.mark.parametrize("mode", MODES)
DEPTHS = pytest.mark.parametrize("depth", [1, 3])


def rig_of(mode: str, backend: str, launcher: str, page_size: int, **more) -> LatentRig:
    return LatentRig(mode, backend, launcher, page_size, context=max(96, 4 * page_size), **more)


def edges(page_size: int) -> list[int]:
    return sorted({page_size - 1, page_size, page_size + 1, 2 * page_size + 1} - {0})


@BACKENDS
@ALL_MODES
@DEPTHS
def test_serves_ragged_requests_through_moves(backend, launcher, page_size, mode, depth):
    lengths = edges(page_size)
    decoy = len(lengths) + 1
    rig = rig_of(mode, backend, launcher, page_size, requests=decoy, depth=depth)
    work = {decoy: 30} | dict(enumerate(lengths, 1))
    rig.step(work, mode=ForwardMode.EXTEND).assert_earned()
    rig.release(decoy)  # its pages become holes below everybody else's
    assert (rig.move() > 0) is (mode != "static")
    del work[decoy]
    rig.step(dict.fromkeys(work, 1)).assert_earned()
    rig.step({1: 3, 2: 1, 3: page_size}).assert_earned()
    rig.step(dict.fromkeys(reversed(work), 2)).assert_earned()  # a verify


@BACKENDS
@ALL_MODES
def test_captured_equals_eager_in_buffers_that_stay(backend, launcher, page_size, mode):
    rig, eager = (rig_of(mode, backend, launcher, page_size, depth=1) for _ in range(2))
    rig.attention.capture(4)
    for one in (rig, eager):
        one.step({1: 13, 2: 40, 3: page_size, 4: 22})
    addresses = {}
    for work in ({1: 1, 2: 1, 3: 1, 4: 1}, {2: 1, 1: 1, 3: 1}, {3: 1, 1: 1}, {1: 1, 2: 1, 3: 1}):
        pad_to = 4 if len(work) > 2 else 2
        step, expected = rig.step(work, pad_to=pad_to, replay=True), eager.step(work, pad_to=pad_to)
        step.assert_earned()
        assert torch.equal(step.out[0], expected.out[0])
        known = addresses.setdefault(step.batch.size, tensors(step.metadata))
        for name, now in tensors(step.metadata).items():
            assert now.data_ptr() == known[name].data_ptr(), f"{name} was rebound"
            assert now.shape == known[name].shape, f"{name} changed its shape"
        for one in (rig, eager):
            if 4 in work:
                one.release(4)
            one.move()


@BACKENDS
def test_pools_agree_to_the_bit_and_with_the_oracle(backend, launcher, page_size):
    rigs = [rig_of(mode, backend, launcher, page_size, dtype=torch.bfloat16) for mode in MODES]
    for rig in rigs:
        rig.step({4: 20, 1: 13, 2: 40})
        rig.release(4)
        rig.move()
    for work in ({1: 6, 2: 1}, {1: 1, 2: 1}):
        steps = [rig.step(work) for rig in rigs]
        for step in steps:
            step.assert_earned()
            for layer, out in step.out.items():
                assert torch.equal(out, steps[0].out[layer]), f"layer {layer}"
        for step, rig in zip(steps, rigs, strict=True):
            for layer in rig.layers:
                step.out[layer.index] = execute(step.metadata, layer, step.q[layer.index], rig.pool)
            step.assert_earned()
