"""On a GPU: the MLA backends at 16 heads and 512 + 64 against fp64, on all pools to the bit, in graphs, beside figures.

Seconds a test, but for FlashInfer's first one, which compiles where nothing is prebuilt.
"""

import statistics

import pytest
import torch

from suite.kernels.attention.mla_prefill import MlaPrefill, attend_fa3, attend_reference, launcher_refusal
from suite.kernels.attention.support import backend_class
from suite.kernels.batch import ForwardMode
from suite.kernels.ops import bench_mla
from suite.kernels.ops.mla_decode import mla_attention, mla_attention_torch
from suite.kernels.ops.mla_tiles import MlaTile
from suite.measure import cold_times_us
from tests.mla_rig import MODES, LatentRig
from tests.test_attention_mla_kernel import inputs

pytestmark = pytest.mark.gpu

CASES = [
    ("triton", 1),
    ("triton", 64),
    ("fa3", 1),
    ("fa3", 64),
    ("flashinfer_mla", 1),
    ("flashinfer_mla", 64),
    ("flashmla", 64),
]
BACKENDS = pytest.mark.parametrize(("backend", "page_size"), CASES, ids=[f"{name}-{size}" for name, size in CASES])


def gpu_rig(mode: str, backend: str, page_size: int, **more) -> LatentRig:
    if reason := backend_class(backend).launchers("cuda")["native"]:
        pytest.skip(reason)
    fields = {"q_heads": 16, "latent": 512, "rope": 64, "dtype": torch.bfloat16, "context": 1536, "requests": 4}
    return LatentRig(mode, backend, "native", page_size, device="cuda", **(fields | more))


@BACKENDS
@pytest.mark.parametrize("mode", MODES)
def test_native_against_dense(backend, page_size, mode):
    rig = gpu_rig(mode, backend, page_size)
    rig.step({4: 300, 1: 127, 2: 700, 3: 1}, mode=ForwardMode.EXTEND).assert_earned()
    rig.release(4)
    assert (rig.move() > 0) is (mode != "static")
    rig.step({1: 1, 2: 1, 3: 1}).assert_earned()
    rig.step({1: 4, 2: 4, 3: 4}).assert_earned()  # a verify
    rig.step({1: 2, 2: 60, 3: 130}).assert_earned()
    rig.step({3: 1, 2: 1, 1: 1}).assert_earned()


@BACKENDS
@pytest.mark.parametrize("depth", [1, 3])
def test_pools_agree_to_the_bit(backend, page_size, depth):
    rigs = [gpu_rig(mode, backend, page_size, depth=depth) for mode in MODES]
    for rig in rigs:
        rig.step({4: 300, 1: 127, 2: 700, 3: 1})
        rig.release(4)
        rig.move()
    for work in ({1: 200, 2: 1}, {1: 4, 2: 4}, {1: 1, 2: 1, 3: 1}):
        static, *others = (rig.step(work) for rig in rigs)
        for mode, other in zip(MODES[1:], others, strict=True):
            for layer in static.out:
                assert torch.equal(static.out[layer], other.out[layer]), f"{mode}, layer {layer}"


@BACKENDS
def test_a_captured_graph_follows_lengths_and_moves(backend, page_size):
    rig = gpu_rig("unified", backend, page_size)
    rig.step({4: 300, 1: 127, 2: 700, 3: 15})
    rig.attention.capture(4)
    layer = rig.layers[-1]
    q, k = rig.randn(4, rig.q_heads), rig.randn(4, 1)
    metadata = rig.attention.replay(rig.batch({1: 1, 2: 1, 3: 1}, pad_to=4))
    rig.attention.forward(layer, q, k, None, metadata)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rig.attention.forward(layer, q, k, None, metadata)
    rig.release(4)
    for _ in range(3):
        rig.move()
        batch = rig.batch({1: 1, 2: 1, 3: 1}, pad_to=4)
        rig.attention.replay(batch)
        graph.replay()
        captured = out.clone()
        eager = rig.attention.forward(layer, q, k, None, rig.attention.plan(batch))
        # a vendor may split a wider table or another schedule otherwise: one rounding of the largest value
        allowed = 0 if backend == "triton" else torch.finfo(rig.dtype).eps * eager[:3].abs().max()
        assert (captured[:3] - eager[:3]).abs().max() <= allowed
        rig.release(3)  # a hole for the next move, and a request that starts over
        rig.step({3: 40})


@pytest.mark.parametrize("q_heads", [1, 16, 24, 32, 64, 128])
@pytest.mark.parametrize("splits", [1, 3, 16])
def test_triton_heads_and_splits(q_heads, splits):
    rig = gpu_rig("unified", "triton", 1, q_heads=q_heads, depth=1)
    rig.attention.latent_splits = lambda layer, batch, queries: splits
    rig.step({1: 127, 2: 700, 3: 1}).assert_earned()
    rig.step({1: 1, 2: 1, 3: 1}).assert_earned()
    rig.step({1: 5, 2: 5, 3: 5}).assert_earned()


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("queries", [1, 3])
def test_triton_keys_first_answers_as_queries_first(queries, splits):
    q, rows, offsets, indptr, indices = inputs([queries] * 3, [300, 7, 1025], 16, 576)
    arguments = [q.cuda().bfloat16(), rows.cuda().bfloat16(), *(each.cuda() for each in (offsets, indptr, indices))]
    exact = mla_attention_torch(arguments[0].float(), *arguments[1:], 512, 576**-0.5)
    tiles = [
        MlaTile(rows=16, keys=32, warps=4, stages=5),
        MlaTile(rows=16, keys=64, warps=4, stages=3, keys_first=True),
        MlaTile(rows=16, keys=64, warps=8, stages=3, keys_first=True),
    ]
    off = [(mla_attention(*arguments, 512, 576**-0.5, queries, splits, tile) - exact).abs().max() for tile in tiles]
    # both round their weights and outputs to bf16, in other places
    assert max(off[1:]) <= 2 * off[0] + torch.finfo(torch.bfloat16).eps * exact.abs().max()


def test_triton_reaches_rows_past_32_bits():
    """Row 4,000,000 of 576 elements lies past element 2^31."""
    q, rows, offsets, indptr, indices = inputs([1, 2], [70, 40], 16, 576)
    arguments = offsets.cuda(), indptr.cuda()
    near, far = rows.to("cuda", torch.bfloat16), torch.zeros(4_000_200, 576, dtype=torch.bfloat16, device="cuda")
    far[4_000_000 - 300 : 4_000_000 - 300 + len(near)] = near
    query, near_ids = q.to("cuda", torch.bfloat16), indices.cuda()
    far_ids = near_ids + (4_000_000 - 300)
    assert int(far_ids.max()) * 576 > 2**31
    out = [
        mla_attention(query, view, *arguments, ids, 512, 576**-0.5, 2, 2)
        for view, ids in ((near, near_ids), (far, far_ids))
    ]
    assert torch.equal(*out)


def test_expanded_prefill_by_fa3():
    if reason := launcher_refusal("native", "cuda"):
        pytest.skip(reason)
    q = torch.randn(300, 16, 192, dtype=torch.bfloat16, device="cuda")
    k = torch.randn(700, 16, 192, dtype=torch.bfloat16, device="cuda")
    v = torch.randn(700, 16, 128, dtype=torch.bfloat16, device="cuda")
    queries, keys = (torch.tensor(lens, dtype=torch.int32, device="cuda") for lens in ([0, 100, 300], [0, 0, 700]))
    out, lse = attend_fa3(q, k, v, queries, 200, keys, 700, 192**-0.5, False)
    exact, exact_lse = attend_reference(q, k, v, queries, 200, keys, 700, 192**-0.5, False)
    assert not out[:100].any()
    assert (lse[:100] == -torch.inf).all()
    scores = torch.einsum("qhd,khd->qhk", q[100:], k) * 192**-0.5
    rough = torch.einsum("qhk,khd->qhd", scores.softmax(-1), v)
    floor = torch.finfo(torch.bfloat16).eps * exact.abs().max()
    assert (out - exact).abs().max() <= 2 * (rough.float() - exact[100:]).abs().max() + floor
    assert (lse[100:] - exact_lse[100:]).abs().max() <= torch.finfo(torch.bfloat16).eps * exact_lse[100:].abs().max()


@pytest.mark.parametrize("mode", MODES)
def test_expanded_prefill_agrees_across_chunk_sizes(mode):
    rig = gpu_rig(mode, "triton", 16)
    rig.step({4: 300, 1: 127, 2: 700, 3: 1})
    rig.release(4)
    rig.move()
    up = torch.randn(512, 16 * 256, dtype=torch.bfloat16, device="cuda") * 512**-0.5

    def expand(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = (rows[:, :512] @ up).view(-1, 16, 256).split(128, -1)
        rope = rows[:, None, 512:].expand(-1, 16, -1)
        return torch.cat([key, rope], -1), value.contiguous()

    batch, results = rig.batch({1: 100, 2: 33}), {}
    q, rows = torch.randn(133, 16, 192, dtype=torch.bfloat16, device="cuda"), rig.randn(133, 1)[:, 0]
    for launcher in ("reference", "native"):
        if reason := launcher_refusal(launcher, "cuda"):
            pytest.skip(reason)
        for chunk_tokens in (64, 1000, 100_000):
            one = MlaPrefill(pool=rig.pool, translator=rig.translator, launcher=launcher, chunk_tokens=chunk_tokens)
            results[launcher, chunk_tokens] = one.forward(0, batch, q, rows, 192**-0.5, expand).float()
    exact = results["reference", 100_000]
    for result in results.values():
        # outputs, and FA3's parts of them, are bf16: two roundings of the largest
        assert (result - exact).abs().max() <= 2 * torch.finfo(torch.bfloat16).eps * exact.abs().max()


@BACKENDS
def test_decode_figures(backend, page_size, record_property, capsys):
    """Batch 32, 16 heads, 4,096 tokens in a graph with a cold L2: prints microseconds and TB/s, and asserts no rate.

    To be read beside FlashMLA 2.72, FA3 2.45, FlashInfer 2.70 TB/s at page 64, and 2.4 for our own at both.
    """
    rig = gpu_rig("unified", backend, page_size, context=4160, requests=32, depth=1, poison=False)
    batch = rig.batch(dict.fromkeys(range(1, 33), 4095))
    k = rig.randn(32 * 4095, 1)
    rig.pool.write(0, batch.write_ids, k, None)
    rig.attention.capture(32)
    metadata = rig.attention.replay(rig.batch(dict.fromkeys(range(1, 33), 1)))
    q, new = rig.randn(32, 16), rig.randn(32, 1)
    rig.attention.forward(rig.layers[0], q, new, None, metadata)
    us = statistics.median(cold_times_us(lambda: rig.attention.forward(rig.layers[0], q, new, None, metadata), 50))
    rate = 32 * 4096 * 576 * 2 / us / 1e6
    record_property("us", us)
    with capsys.disabled():
        print(f"\n{backend} page {page_size}: {us:.1f} us with the row write, {rate:.2f} TB/s")
    assert us > 0


def test_bench_prints_a_line_per_cut(monkeypatch, capsys):
    monkeypatch.setattr(bench_mla, "CUTS", bench_mla.CUTS[1::5])  # queries first and keys first
    monkeypatch.setattr(bench_mla, "SPLITS", (1, 8))
    assert bench_mla.main(["--batch", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(bench_mla.PAGE_SIZES) * 5
    assert all(float(line.split()[-1]) < 0.1 for line in lines[2:]), "a cut that answers something else"
