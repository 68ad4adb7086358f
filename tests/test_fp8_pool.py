"""fp8 KV with one scale per tensor: what is stored, what the oracle reads back, poison, and bad scales."""

import dataclasses

import pytest
import torch

from suite.errors import InputError
from suite.kernels.attention.reference import ReferenceBackend
from suite.kernels.batch import ForwardBatch, ForwardMode
from suite.kernels.geometry import FP8, AttentionLayer, RunnerGeometry
from suite.kernels.ids import KernelIds, KVKind, VirtualIds
from suite.kernels.ops.write_kv import write_kv_torch, write_kv_triton
from suite.kernels.translator import KVIndexTranslator
from tests.pool_rig import MODES, build, rows

SCALES = (0.03, 2.5)


def layer(**changes) -> AttentionLayer:
    fields = {"index": 0, "q_heads": 4, "kv_heads": 2, "head_dim": 16, "scale": 0.25}
    return AttentionLayer(**(fields | {"k_scale": SCALES[0], "v_scale": SCALES[1]} | changes))


def geometry(dtype: torch.dtype = FP8) -> RunnerGeometry:
    return RunnerGeometry.from_layers([layer(), layer(index=1, window=8, k_scale=1.0)], dtype, 4)


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_divided_by_their_scale_and_saturate(mode):
    allocator = build(mode, geometry())
    pool, (page,) = allocator.pool, allocator.alloc(1)
    where = rows(allocator, KVKind.FULL, page)
    ids = KernelIds(torch.arange(where.start, where.stop), KVKind.FULL)
    k, v = torch.randn(4, 2, 16).bfloat16(), torch.randn(4, 2, 16).bfloat16() * 30
    k[0, 0, 0], v[0, 0, 0] = 1e6, -1e6
    pool.write(0, ids, k, v)
    for view, new, scale in ((pool.k_view(0), k, SCALES[0]), (pool.v_view(0), v, SCALES[1])):
        got = view.view(torch.uint8)[where].view(FP8).float()
        assert got.isfinite().all()
        assert got[0, 0, 0].abs() == 448
        want = (new.float() / scale).clamp(-448, 448)
        assert ((got - want).abs() <= want.abs() * 2**-4 + 2**-10).all(), "more than half a step of three mantissa bits"
    assert pool.scales(0) == SCALES
    assert pool.scales(1) == (1.0, SCALES[1])


def stored_by(store, k: torch.Tensor, v: torch.Tensor, scales: tuple[float, float]) -> list[torch.Tensor]:
    """The bytes of a K and a V view after rows 4, 1 and 3 were stored."""
    views = [torch.zeros(6, 2, 16, dtype=torch.uint8, device=k.device).view(FP8) for _ in range(2)]
    store(*views, torch.tensor([4, 1, 3], device=k.device), k, v, *scales)
    return [view.view(torch.uint8) for view in views]


def test_the_kernel_stores_what_its_twin_stores():
    """Of numbers that fp8 holds, and of some past its range: Triton's interpreter does not carry when it rounds."""
    k, v = (torch.randn(3, 2, 16).to(FP8).float() * scale for scale in (0.25, 2.0))
    k[1, 0, :3], v[2, 1, :3] = torch.tensor([1e5, -1e5, 112.0]), torch.tensor([1e5, -1e5, -896.0])
    kernel, twin = (stored_by(store, k, v, (0.25, 2.0)) for store in (write_kv_triton, write_kv_torch))
    for a, b in zip(kernel, twin, strict=True):
        assert torch.equal(a, b)
        assert not a[[0, 2, 5]].any()
        assert a.any()


@pytest.mark.gpu
def test_the_kernel_rounds_to_nearest_on_a_gpu():
    k, v = torch.randn(3, 2, 16, device="cuda"), torch.randn(3, 2, 16, device="cuda") * 600
    for dtype in (torch.float32, torch.bfloat16):
        kernel, twin = (stored_by(s, k.to(dtype), v.to(dtype), SCALES) for s in (write_kv_triton, write_kv_torch))
        assert all(torch.equal(a, b) for a, b in zip(kernel, twin, strict=True))


def test_rows_that_are_fp8_already_are_stored_as_they_are():
    view = torch.zeros(3, 2, 16, dtype=torch.uint8).view(FP8)
    new = torch.randn(2, 2, 16).to(FP8)
    write_kv_torch(view, None, torch.tensor([2, 1]), new, None, 0.1)
    assert torch.equal(view.view(torch.uint8)[[2, 1]], new.view(torch.uint8))


@pytest.mark.parametrize("mode", MODES)
def test_the_oracle_multiplies_by_the_scales(mode):
    """Rows that fp8 can hold after division by their scales attend as they do in an fp32 pool, bit for bit."""
    scales = (0.25, 2.0)
    k, v = (torch.randn(9, 2, 16).to(FP8).float() * scale for scale in scales)
    q, outputs = torch.randn(9, 4, 16), []
    for dtype in (torch.float32, FP8):
        layers = [layer(index=at, window=w, k_scale=scales[0], v_scale=scales[1]) for at, w in ((0, None), (1, 8))]
        allocator = build(mode, RunnerGeometry.from_layers(layers, dtype, 4))
        pages = allocator.alloc(3)
        ids = torch.tensor([page * 4 + at for page in pages for at in range(4)])[:9]
        table = torch.zeros(2, 12, dtype=torch.int32)
        table[1, :9] = ids
        translator = KVIndexTranslator(pool=allocator.pool, allocator=allocator, req_to_token=table)
        backend = ReferenceBackend(pool=allocator.pool, translator=translator, launcher="reference", sinks=False)
        batch = ForwardBatch.create(
            mode=ForwardMode.EXTEND,
            input_ids=[0] * 9,
            req_rows=[1],
            seq_lens=[9],
            query_lens=[9],
            virtual_write_ids=VirtualIds(ids),
            translator=translator,
        )
        metadata = backend.plan(batch)
        outputs.append([backend.forward(each, q, k, v, metadata) for each in layers])
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def test_fp8_rows_are_poisoned_in_every_byte():
    for mode in MODES:
        allocator = build(mode, geometry())
        (page,) = allocator.alloc(1)
        where = rows(allocator, KVKind.FULL, page)
        assert not allocator.pool.k_view(0).view(torch.uint8)[where].any()
        allocator.free([page])
        assert allocator.pool.k_view(0)[where].float().isnan().all()


def test_bad_scales_are_named():
    full = geometry().full
    for scales, message in (
        ((), None),
        (((0.0, 1.0),), r"scales: got \(0\.0, 1\.0\), expected positive, finite numbers"),
        (((1.0, float("inf")),), "expected positive, finite numbers"),
        (((1.0, 1.0), (1.0, 1.0)), "scales: got 2, expected 1"),
    ):
        if message is None:
            assert dataclasses.replace(full, scales=scales).scales_of(0) == (1.0, 1.0)
            continue
        with pytest.raises(InputError, match=message):
            dataclasses.replace(full, scales=scales)
    with pytest.raises(InputError, match=r"scales: .* expected none for torch\.bfloat16"):
        dataclasses.replace(full, dtype=torch.bfloat16)
    assert geometry(torch.bfloat16).full.scales == (), "a checkpoint's scales mean nothing to a bf16 pool"
    latent = layer(kv_heads=1, head_dim=32, v_head_dim=16, is_latent=True)
    with pytest.raises(InputError, match="one number for both: a latent row holds its value"):
        RunnerGeometry.from_layers([latent], FP8, 4)
