"""The state pool: the byte law of a strided slot, layouts that agree, and shapes of the real models."""

import dataclasses

import pytest
import torch

from suite.errors import InputError
from suite.kernels.pools.state import (
    KernelSlots,
    StateGeometry,
    StatePool,
    VerifyScratch,
    VirtualSlots,
    require_kernel_slots,
)

SMALL = StateGeometry(layers=(0, 3, 4), conv_dim=20, v_heads=2, v_dim=4, k_dim=6)
KDA = dataclasses.replace(SMALL, taps_first=True)
LIGHTNING = dataclasses.replace(SMALL, conv_dim=0)
SHAPES = pytest.mark.parametrize("shape", [SMALL, KDA, LIGHTNING], ids=["gdn", "kda", "lightning"])


def strided(shape: StateGeometry, slots: int = 4, offset: int = 32, **how) -> tuple[StatePool, torch.Tensor]:
    buffer = torch.full((offset + (slots + 1) * shape.slot_bytes + 40,), 0xAB, dtype=torch.uint8)
    return StatePool.strided(shape, slots, buffer, offset, **how), buffer


@pytest.mark.parametrize(
    ("shape", "layers", "slot_bytes"),
    [
        (StateGeometry(layers=(0,), conv_dim=8192, v_heads=32, v_dim=128, k_dim=128), 36, 77_266_944),
        (StateGeometry(layers=(0,), conv_dim=8192, v_heads=32, v_dim=128, k_dim=128), 24, 51_511_296),
        (StateGeometry(layers=(0,), conv_dim=12288, v_heads=32, v_dim=128, k_dim=128, taps_first=True), 20, 43_417_600),
    ],
    ids=["Qwen3-Next-80B", "Qwen3.5-9B", "Kimi-Linear-48B"],
)
def test_slots_of_real_models(shape, layers, slot_bytes):
    real = dataclasses.replace(shape, layers=tuple(range(layers)))
    assert real.slot_bytes == slot_bytes
    assert real.window_shape == ((3, 12288) if shape.taps_first else (8192, 3))
    assert real.temporal_shape == (32, 128, 128)


@SHAPES
def test_bytes_of_a_strided_slot(shape):
    """Stamp each layer's state through the views, and find it in the buffer by counting bytes."""
    pool, buffer = strided(shape)
    conv_bytes, temporal_bytes = shape.conv_dim * 3 * 2, 2 * 4 * 6 * 4
    for slot in range(5):
        for at, layer in enumerate(shape.layers):
            views = pool.state_views(layer)
            if views.conv is not None:
                views.conv[slot] = torch.arange(shape.conv_dim * 3).view(shape.window_shape) % 100 + slot
            views.temporal[slot] = torch.arange(48.0).view(2, 4, 6) + 1000 * slot + 100 * at
    envelope = 3 * (conv_bytes + temporal_bytes)
    for slot in range(5):
        first = 32 + slot * envelope
        for at in range(3):
            if conv_bytes:
                window = buffer[first + at * conv_bytes : first + (at + 1) * conv_bytes].view(torch.bfloat16)
                assert torch.equal(window, (torch.arange(shape.conv_dim * 3) % 100 + slot).bfloat16())
            begin = first + 3 * conv_bytes + at * temporal_bytes
            state = buffer[begin : begin + temporal_bytes].view(torch.float32)
            assert torch.equal(state, torch.arange(48.0) + 1000 * slot + 100 * at)
    assert (buffer[:32] == 0xAB).all()
    assert (buffer[32 + 5 * envelope :] == 0xAB).all()


@SHAPES
@pytest.mark.parametrize("layout", ["static", "strided"])
def test_copies_and_poison(shape, layout):
    pool = StatePool.static(shape, 4, "cpu", poison=True) if layout == "static" else strided(shape, poison=True)[0]
    assert pool.slots == 4
    for stream in pool.streams():
        assert stream.shape[:2] == (3, 5)
        assert stream[:, 1:].isnan().all()
        assert not stream[:, 0].any()
        stream[:, 2] = torch.randn(stream[:, 2].shape).to(stream.dtype)
    kept = [stream[:, 2].clone() for stream in pool.streams()]
    pool.copy_slots(KernelSlots(torch.tensor([2, 2, -1])), KernelSlots(torch.tensor([4, -1, 3])))
    pool.poison_slots(torch.tensor([2]))
    for stream, want in zip(pool.streams(), kept, strict=True):
        assert torch.equal(stream[:, 4], want)
        assert stream[:, [1, 2, 3]].isnan().all()
    calm = StatePool.static(shape, 2, "cpu")
    calm.poison_slots(torch.tensor([1]))
    assert not any(stream.any() for stream in calm.streams())


@SHAPES
def test_commit_takes_exactly_the_named_node(shape):
    pool = StatePool.static(shape, 4, "cpu", poison=True)
    scratch = VerifyScratch(pool, 4, 3)
    rows = scratch.rows(torch.tensor([3, 0, -1, 2]))
    assert rows.tolist() == [0, 4, 4, 3]
    for layer in shape.layers:
        views = scratch.state_views(layer)
        views.temporal[:] = torch.randn(views.temporal.shape)
        if views.conv is not None:
            views.conv[:] = torch.randn(views.conv.shape)
    slots = KernelSlots(torch.tensor([3, 0, -1, 2]))
    scratch.commit(pool, rows, slots, torch.tensor([1, -1, 2, -1]))
    for layer in shape.layers:
        held, got = scratch.state_views(layer), pool.state_views(layer)
        assert torch.equal(got.temporal[3], held.temporal[0, 1])
        assert got.temporal[[1, 2, 4]].isnan().all()
        assert not got.temporal[0].any()
        if got.conv is not None and held.conv is not None:
            assert torch.equal(got.conv[3], held.conv[0, 1])
            assert got.conv[[1, 2, 4]].isnan().all()
    with pytest.raises(InputError, match="at most 4 requests"):
        scratch.rows(torch.zeros(5, dtype=torch.int64))


def test_bad_pools_are_named():
    with pytest.raises(InputError, match="layers: got"):
        dataclasses.replace(SMALL, layers=(1, 1))
    with pytest.raises(InputError, match="k_dim: got 0"):
        dataclasses.replace(SMALL, k_dim=0)
    with pytest.raises(InputError, match=r"temporal_dtype: got torch.float16"):
        dataclasses.replace(SMALL, temporal_dtype=torch.float16)
    with pytest.raises(InputError, match="slots: got 0"):
        StatePool.static(SMALL, 0, "cpu")
    buffer = torch.zeros(5 * SMALL.slot_bytes, dtype=torch.uint8)
    with pytest.raises(
        InputError, match=rf"buffer: got {buffer.numel()}, expected at least {buffer.numel() + 4} bytes"
    ):
        StatePool.strided(SMALL, 4, buffer, 4)
    with pytest.raises(InputError, match="first byte: got 6, expected a multiple of 4"):
        StatePool.strided(LIGHTNING, 3, torch.zeros(10 * LIGHTNING.slot_bytes, dtype=torch.uint8), 6)
    odd = dataclasses.replace(SMALL, layers=(0,), conv_dim=7)  # 42 bytes of windows: states would be misaligned
    with pytest.raises(InputError, match="first byte: got 42, expected a multiple of 4"):
        StatePool.strided(odd, 2, torch.zeros(9000, dtype=torch.uint8))
    with pytest.raises(InputError, match="a flat uint8 tensor"):
        StatePool.strided(SMALL, 1, torch.zeros(9000))
    with pytest.raises(KeyError, match="layer 1 has no recurrent state"):
        StatePool.static(SMALL, 1, "cpu").state_views(1)
    with pytest.raises(TypeError, match="here: needs KernelSlots, got VirtualSlots"):
        require_kernel_slots(VirtualSlots(torch.tensor([1])), "here")
    with pytest.raises(InputError, match="draft_tokens: got 0"):
        VerifyScratch(StatePool.static(SMALL, 1, "cpu"), 2, 0)
