"""On a GPU: flashinfer, trtllm_mha and fa4 against dense attention, in graphs, on all pools to the bit, by probes."""

import dataclasses

import pytest
import torch

from suite.kernels.attention.support import native_refusal
from suite.kernels.batch import ForwardMode
from suite.kernels.ids import KVKind
from tests.attention_rig import Rig

pytestmark = pytest.mark.gpu

LLAMA = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "window": None, "sinks": False}
GPT_OSS = {"q_heads": 64, "kv_heads": 8, "head_dim": 64, "window": 128, "sinks": True}
WINDOWS = GPT_OSS | {"sinks": False}
SHAPES = pytest.mark.parametrize("shape", [LLAMA, GPT_OSS, WINDOWS], ids=["llama", "gpt_oss", "windows"])
CASES = [("flashinfer", 1), ("flashinfer", 16), ("trtllm_mha", 16), ("trtllm_mha", 64), ("fa4", 128)]
BACKENDS = pytest.mark.parametrize(("backend", "page_size"), CASES, ids=[f"{name}-{size}" for name, size in CASES])


def gpu_rig(mode: str, backend: str, page_size: int, shape: dict, context: int = 1536, requests: int = 4) -> Rig:
    if reason := native_refusal(backend, "cuda"):
        pytest.skip(reason)
    return Rig(
        mode,
        backend,
        "native",
        page_size,
        device="cuda",
        dtype=torch.bfloat16,
        context=context,
        requests=requests,
        **shape,
    )


@BACKENDS
@SHAPES
def test_native_against_dense(backend, page_size, shape):
    rig = gpu_rig("unified", backend, page_size, shape)
    rig.step({4: 300, 1: 127, 2: 700, 3: 1}, mode=ForwardMode.EXTEND).assert_earned()
    rig.release(4)
    assert rig.move() > 0
    rig.step({1: 1, 2: 1, 3: 1}).assert_earned()
    rig.step({1: 4, 2: 4, 3: 4}).assert_earned()  # verify
    rig.step({1: 2, 2: 600, 3: 130}).assert_earned()
    rig.step({3: 1, 2: 1, 1: 1}).assert_earned()


@BACKENDS
@SHAPES
def test_pools_agree_to_the_bit(backend, page_size, shape):
    rigs = [gpu_rig(mode, backend, page_size, shape) for mode in ("static", "unified", "unified_token_major")]
    for rig in rigs:
        rig.step({4: 300, 1: 127, 2: 700, 3: 1})
        rig.release(4)
        rig.move()
    for work in ({1: 200, 2: 1}, {1: 4, 2: 4}, {1: 1, 2: 1, 3: 1}):
        one, *others = (rig.step(work) for rig in rigs)
        for other in others:
            for layer in one.out:
                assert torch.equal(one.out[layer], other.out[layer]), f"{work}, layer {layer}"


@BACKENDS
@SHAPES
def test_a_captured_graph_follows_lengths_and_moves(backend, page_size, shape):
    rig = gpu_rig("unified", backend, page_size, shape)
    rig.step({4: 300, 1: 127, 2: 700, 3: 15})
    rig.attention.capture(4)
    layers = rig.layers[:2]  # one of each kind where there are two
    inputs = {
        layer.index: [rig.randn(4, heads) for heads in (rig.q_heads, rig.kv_heads, rig.kv_heads)] for layer in layers
    }
    metadata = rig.attention.replay(rig.batch({}, mode=ForwardMode.DECODE, pad_to=4))
    for layer in layers:
        rig.attention.forward(layer, *inputs[layer.index], metadata)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = {layer.index: rig.attention.forward(layer, *inputs[layer.index], metadata) for layer in layers}
    rig.release(4)
    work = {1: 1, 2: 1, 3: 1}
    for _ in range(4):
        rig.move()
        rig.attention.replay(rig.batch(work, pad_to=4))
        for layer in layers:
            for buffer in inputs[layer.index]:
                buffer.copy_(torch.randn(buffer.shape, generator=rig.random))
        graph.replay()
        for layer in layers:
            out, (exact, rough) = outs[layer.index][:3], rig._expect(layer, work, *inputs[layer.index])
            assert out.isfinite().all()
            allowed = 2 * (rough - exact).abs().max() + torch.finfo(out.dtype).eps * exact.abs().max()
            assert (out - exact).abs().max() <= allowed, f"layer {layer.index}"
        rig.evict(work)
        rig.release(3)  # a hole for the next move, and a request that starts over
        rig.step({3: 40})


@BACKENDS
@pytest.mark.parametrize("shape", [LLAMA, WINDOWS], ids=["llama", "windows"])
def test_probes_show_which_positions_are_read(backend, page_size, shape):
    """Queries of zeros weigh what they see alike and value row j is one-hot at j modulo 64: outputs count positions."""
    rig = gpu_rig("unified", backend, page_size, shape)
    start = 0
    for new in (300, 1, 4, 70, 1):
        metadata = rig.attention.plan(rig.batch({1: new}))
        position = torch.arange(start, start + new, device="cuda")
        start += new
        zeros = torch.zeros(new, rig.q_heads, rig.head_dim, dtype=rig.dtype, device="cuda")
        k = zeros[:, : rig.kv_heads].contiguous()
        v = torch.nn.functional.one_hot(position % 64, rig.head_dim).to(rig.dtype)[:, None].expand_as(k).contiguous()
        for layer in rig.layers:
            out = rig.attention.forward(layer, zeros, k, v, metadata).double()
            for query, at in zip(out, position.tolist(), strict=True):
                seen = torch.arange(0 if layer.window is None else max(0, at - layer.window + 1), at + 1)
                expected = torch.bincount(seen % 64, minlength=rig.head_dim).cuda()
                counted = (query * len(seen)).round()
                assert torch.equal(counted, expected.double().expand_as(counted)), f"layer {layer.index}, query {at}"


@BACKENDS
def test_rows_past_two_to_the_31_elements(backend, page_size):
    """A full pool whose rows lie at the far end of a view of more than 2^31 elements."""
    rig = gpu_rig("unified", backend, page_size, WINDOWS, context=65_536)
    assert rig.pool.k_view(0).numel() > 2**31
    rig.step({1: 127, 2: 300}).assert_earned()
    step = rig.step({1: 1, 2: 1})
    step.assert_earned()
    width = rig.kv_heads * rig.head_dim
    ids = [step.metadata.write_ids_of(kind).tensor for kind in KVKind]
    assert max(int(each.max()) for each in ids) * width > 2**31, "nothing lies past 2^31"


def test_scales_of_one_kind_may_differ():
    """flashinfer plans with the scale: layers that share a stream but not it get a plan of their own."""
    rig = gpu_rig("unified", "flashinfer", 16, WINDOWS)
    rig.layers = [dataclasses.replace(layer, scale=layer.scale * (1 + layer.index)) for layer in rig.layers]
    rig.step({1: 127, 2: 300}).assert_earned()
    rig.step({1: 1, 2: 1}).assert_earned()
