"""On a GPU: compiled kernels and the vendor's against dense attention, captured graphs, and both pools to the bit."""

import importlib.util

import pytest
import torch

from suite.kernels.batch import ForwardMode
from suite.kernels.ops import bench
from suite.kernels.ops.read_stream import read_stream, read_stream_torch
from suite.kernels.ops.read_table import read_table, read_table_torch
from suite.kernels.ops.write_loc import write_loc, write_loc_torch
from tests.attention_rig import Rig

pytestmark = pytest.mark.gpu

LLAMA = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "window": None, "sinks": False}
GPT_OSS = {"q_heads": 64, "kv_heads": 8, "head_dim": 64, "window": 128, "sinks": True}
QWEN = {"q_heads": 16, "kv_heads": 2, "head_dim": 256, "window": None, "sinks": False}
SHAPES = pytest.mark.parametrize("shape", [LLAMA, GPT_OSS, QWEN], ids=["llama", "gpt_oss", "qwen"])
BACKENDS = pytest.mark.parametrize("backend", ["triton", "fa3"])
PAGES = pytest.mark.parametrize("page_size", [1, 16, 64])


def gpu_rig(mode: str, backend: str, page_size: int, shape: dict, **more) -> Rig:
    if backend == "fa3" and importlib.util.find_spec("sgl_kernel") is None:
        pytest.skip("needs the package sglang-kernel, which is not installed")
    dtype = more.pop("dtype", torch.bfloat16)
    return Rig(
        mode, backend, "native", page_size, device="cuda", dtype=dtype, context=1536, requests=4, **shape, **more
    )


@BACKENDS
@SHAPES
@PAGES
def test_native_against_dense(backend, shape, page_size):
    rig = gpu_rig("unified", backend, page_size, shape)
    rig.step({4: 300, 1: 127, 2: 700, 3: 1}, mode=ForwardMode.EXTEND).assert_earned()
    rig.release(4)
    assert rig.move() > 0
    rig.step({1: 1, 2: 1, 3: 1}).assert_earned()
    rig.step({1: 2, 2: 600, 3: 130}).assert_earned()
    rig.step({3: 1, 2: 1, 1: 1}).assert_earned()


@BACKENDS
@SHAPES
@PAGES
def test_pools_agree_to_the_bit(backend, shape, page_size):
    rigs = [gpu_rig(mode, backend, page_size, shape) for mode in ("static", "unified")]
    for rig in rigs:
        rig.step({4: 300, 1: 127, 2: 700, 3: 1})
        rig.release(4)
        rig.move()
    for work in ({1: 200, 2: 1}, {1: 1, 2: 1, 3: 1}):
        one, other = (rig.step(work) for rig in rigs)
        for layer in one.out:
            assert torch.equal(one.out[layer], other.out[layer]), f"layer {layer}"


@BACKENDS
@SHAPES
def test_a_captured_graph_follows_lengths_and_moves(backend, shape):
    rig = gpu_rig("unified", backend, 16, shape)
    rig.step({4: 300, 1: 127, 2: 700, 3: 15})
    rig.attention.capture(4)
    layer = rig.layers[-1]
    q, k, v = (rig.randn(4, heads) for heads in (rig.q_heads, rig.kv_heads, rig.kv_heads))
    metadata = rig.attention.replay(rig.batch({1: 1, 2: 1, 3: 1}, pad_to=4))
    rig.attention.forward(layer, q, k, v, metadata)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rig.attention.forward(layer, q, k, v, metadata)
    rig.release(4)
    for _ in range(3):
        rig.move()
        batch = rig.batch({1: 1, 2: 1, 3: 1}, pad_to=4)
        rig.attention.replay(batch)
        graph.replay()
        eager = rig.attention.forward(layer, q, k, v, rig.attention.plan(batch))
        exact = torch.finfo(rig.dtype).eps * eager.abs().max()  # fa3 may split a wider table otherwise
        assert (out[:3] - eager[:3]).abs().max() <= (0 if backend == "triton" else exact)
        rig.release(3)  # a hole for the next move, and a request that starts over
        rig.step({3: 40})


def test_fp32_is_not_tensor_float():
    rig = gpu_rig("static", "triton", 4, GPT_OSS, dtype=torch.float32)
    rig.step({1: 127, 2: 300}).assert_earned()
    rig.step({1: 1, 2: 1}).assert_earned()


@pytest.mark.parametrize(("requests", "tokens", "page_size"), [(64, 4096, 1), (256, 8192, 16), (3, 100, 4)])
def test_translations_equal_their_twins(requests, tokens, page_size):
    generator = torch.Generator().manual_seed(1)
    pages = requests * tokens // page_size

    def integers(low, high, shape, dtype=torch.int64):
        return torch.randint(low, high, shape, generator=generator, dtype=dtype).cuda()

    page_map = integers(-1, pages, (pages + 1,))
    req_to_token = integers(-3, pages * page_size + 9, (requests + 1, tokens), torch.int32)
    rows, lens = integers(0, requests, (requests,)), integers(1, tokens + 1, (requests,), torch.int32)
    one = torch.full((requests, -(-tokens // page_size)), -7, dtype=torch.int32, device="cuda")
    other = one.clone()
    read_table(one, req_to_token, rows, lens, page_map, 6, page_size, tokens)
    read_table_torch(other, req_to_token, rows, lens, page_map, 6, page_size)
    assert torch.equal(one, other)
    indptr = torch.cat([torch.zeros(1, device="cuda"), lens.cumsum(0)]).int()
    starts = torch.zeros_like(lens)
    streams = [torch.full((requests * tokens,), -7, dtype=torch.int32, device="cuda") for _ in range(2)]
    row_ids = torch.arange(requests, device="cuda")
    read_stream(streams[0], one, row_ids, page_size, starts, indptr, tokens)
    read_stream_torch(streams[1], one, row_ids, page_size, starts, indptr)
    assert torch.equal(*streams)
    virtual = req_to_token[0]
    assert torch.equal(write_loc(virtual, page_map, 6, page_size), write_loc_torch(virtual, page_map, 6, page_size))


def test_bench_prints_a_line_per_shape(capsys):
    assert bench.main([]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(bench.SHAPES)
