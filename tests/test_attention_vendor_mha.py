"""flashinfer, trtllm_mha and fa4: their calls through stand-ins of the vendors', captures, lanes, the engine."""

import dataclasses
import inspect

import pytest
import torch

from suite.errors import InvariantError, RefusedError
from suite.kernels.attention import fa4, flashinfer, support, trtllm_mha
from suite.kernels.attention.reference import execute
from suite.kernels.batch import ForwardMode
from tests import attention_vendor as vendor
from tests.attention_rig import Rig
from tests.test_engine import served

HOPPER, BLACKWELL = (9, 0), (10, 0)
CASES = [
    ("flashinfer", HOPPER, 4),
    ("flashinfer", HOPPER, 1),
    ("trtllm_mha", HOPPER, 16),
    ("trtllm_mha", BLACKWELL, 16),
    ("fa4", HOPPER, 4),
    ("fa4", BLACKWELL, 128),
]
VENDORS = pytest.mark.parametrize(
    ("backend", "capability", "page_size"), CASES, ids=[f"{name}-sm{gpu[0]}0-{size}" for name, gpu, size in CASES]
)
MODES = pytest.mark.parametrize("mode", ["static", "unified", "unified_token_major"])
SHAPES = pytest.mark.parametrize(
    "shape", [{"window": 10}, {"window": None, "sinks": False}, {"window": 10, "sinks": False}], ids=str
)


@pytest.fixture
def on_gpu(monkeypatch):
    """Make the CPU pass for a GPU of some capability whose libraries are the stand-ins."""

    def install(capability: tuple[int, int]) -> list[str]:
        for module in (support, fa4, trtllm_mha):
            monkeypatch.setattr(module, "gpu_capability", lambda: capability)
        for module in (flashinfer, fa4, trtllm_mha):
            monkeypatch.setattr(module, "native_refusal", lambda name, device: None)
            monkeypatch.setattr(module, "DTYPES", (torch.float32,), raising=True)
        monkeypatch.setattr(flashinfer, "HEAD_DIMS", (16,))
        for module in (flashinfer, trtllm_mha):
            monkeypatch.setattr(module, "WORKSPACE_BYTES", 1024)
        return vendor.stand_in(monkeypatch)

    return install


def native(mode: str, backend: str, page_size: int, **shape) -> Rig:
    return Rig(mode, backend, "native", page_size, context=160 if page_size < 64 else 300, **shape)


@pytest.mark.parametrize("name", vendor.RECORDED)
def test_the_recorded_contract_is_the_installed_one(name):
    real = vendor.REAL[name]
    if real is None:
        pytest.skip(f"needs {name.partition(':')[0]} to compare with, which is not installed")
    theirs = {one.name: one.default is inspect.Parameter.empty for one in real.parameters.values()}
    ours = {one.name: one.default is inspect.Parameter.empty for one in vendor.recorded(name).parameters.values()}
    assert ours.items() <= theirs.items()


@VENDORS
@MODES
@SHAPES
def test_the_vendor_call(on_gpu, backend, capability, page_size, mode, shape):
    """Prefill, chunk, verify and decode through moves, by the vendor's own reading of our arguments."""
    on_gpu(capability)
    rig = native(mode, backend, page_size, **shape)
    rig.step({3: 40, 1: 9, 2: 33}).assert_earned()
    rig.release(3)
    rig.move()
    rig.step({1: 4, 2: 4}, mode=ForwardMode.VERIFY).assert_earned()
    rig.step({2: 1, 1: 26, 4: 2}).assert_earned()
    rig.step({4: 1, 2: 1, 1: 1}).assert_earned()


@VENDORS
@MODES
def test_captured_forwards_follow_lengths_and_moves(on_gpu, backend, capability, page_size, mode):
    """Forward reads the metadata of the capture, as a graph would; only replays refill it. Decodes and verifies."""
    on_gpu(capability)
    rig = native(mode, backend, page_size)
    rig.attention.capture(4, 3)
    rig.step({1: 13, 2: 40, 3: 8, 4: 22})
    held = {}
    for rows, new in (((1, 2, 3, 4), 1), ((1, 2, 3), 3), ((2, 1, 3), 1), ((3, 1), 3), ((1, 2, 3), 3), ((3, 2), 3)):
        work = dict.fromkeys(rows, new)
        mode = ForwardMode.VERIFY if new > 1 else ForwardMode.DECODE
        batch = rig.batch(work, mode, pad_to=4 if len(work) > 2 else 2)
        replayed = rig.attention.replay(batch)
        graph = held.setdefault((batch.size, mode), replayed)
        live = sum(work.values())
        for layer in rig.layers:
            tokens = batch.input_ids.numel()
            q, k, v = (rig.randn(tokens, heads) for heads in (rig.q_heads, rig.kv_heads, rig.kv_heads))
            out = rig.attention.forward(layer, q, k, v, graph)
            exact, rough = rig._expect(layer, work, q, k, v)
            error, allowed = (out[:live] - exact).abs().max(), 2 * (rough - exact).abs().max()
            assert error <= allowed + torch.finfo(rig.dtype).eps * exact.abs().max()
        rig.evict(work)
        if 4 in work:
            rig.release(4)
        rig.move()


@pytest.mark.parametrize(
    ("backend", "page_size"), [("trtllm_mha", 16), ("trtllm_mha", 64), ("fa4", 64), ("flashinfer", 16)]
)
@MODES
def test_the_oracle_reads_every_length_by_its_tables(backend, page_size, mode):
    """Around a page, two pages and the window, eager and captured, pages moving in between."""
    lengths = [page_size - 1, page_size, page_size + 1, 2 * page_size + 1, 19, 20, 21]
    rig = Rig(mode, backend, page_size=page_size, window=20, requests=8, context=200)
    rig.attention.capture(8)
    work = {8: 30} | dict(enumerate(lengths, 1))
    rig.step(work).assert_earned()
    rig.release(8)
    assert (rig.move() > 0) is (mode != "static")
    del work[8]
    rig.step(dict.fromkeys(work, 1), replay=True, pad_to=8).assert_earned()
    rig.step(dict.fromkeys(reversed(work), 3)).assert_earned()
    rig.step(dict.fromkeys(reversed(work), 1)).assert_earned()


def test_flashinfer_plans_once_a_batch_and_again_at_every_replay(on_gpu):
    calls = on_gpu(HOPPER)
    rig = native("unified", "flashinfer", 4, sinks=False)
    rig.step({1: 13, 2: 30})
    assert calls.count("plan BatchPrefillWithPagedKVCacheWrapper") == 2  # five layers of two kinds
    assert calls.count("make BatchPrefillWithPagedKVCacheWrapper") == 2
    rig.attention.capture(2)
    rig.step({1: 1, 2: 1}, replay=True)
    del calls[:]
    batch = rig.batch({2: 1, 1: 1})
    rig.attention.replay(batch)
    assert calls == ["plan BatchDecodeWithPagedKVCacheWrapper"] * 2  # before its graph runs, without a forward
    rig.attention.capture(2)
    del calls[:]
    rig.attention.replay(batch)
    assert not calls, "a wrapper of buffers that are gone"


def test_flashinfer_plans_for_every_scale_apart(on_gpu):
    on_gpu(HOPPER)
    rig = native("unified", "flashinfer", 4, sinks=False)
    rig.layers = [dataclasses.replace(layer, scale=layer.scale * (1 + layer.index)) for layer in rig.layers]
    rig.step({1: 13, 2: 30}).assert_earned()
    rig.step({1: 1, 2: 1}).assert_earned()


def test_flashinfer_never_plans_inside_a_capture(on_gpu, monkeypatch):
    on_gpu(HOPPER)
    rig = native("unified", "flashinfer", 4)
    rig.attention.capture(2)
    rig.step({1: 13, 2: 30})
    metadata = rig.attention.replay(rig.batch({1: 1, 2: 1}))
    q, k = rig.randn(2, rig.q_heads), rig.randn(2, rig.kv_heads)
    rig.attention.forward(rig.layers[0], q, k, k, metadata)
    monkeypatch.setattr(flashinfer, "_is_capturing", lambda: True)
    rig.attention.forward(rig.layers[0], q, k, k, metadata)
    with pytest.raises(InvariantError, match="needs a forward of every captured batch size before its capture"):
        rig.attention.forward(rig.layers[1], q, k, k, metadata)


def test_flashinfer_lets_sinks_into_its_sink_wrapper_only(on_gpu, monkeypatch):
    calls = on_gpu(HOPPER)
    rig = native("unified", "flashinfer", 4)
    rig.step({1: 13, 2: 30})
    rig.step({1: 1, 2: 1})
    assert {call.split()[1] for call in calls} == {"BatchAttentionWithAttentionSinkWrapper"}
    import flashinfer as library

    monkeypatch.delattr(library, "BatchAttentionWithAttentionSinkWrapper")
    monkeypatch.setattr(library, "__version__", "0.2.0", raising=False)
    with pytest.raises(RefusedError, match=r"needs the attention sink wrapper .*, got flashinfer 0\.2"):
        native("unified", "flashinfer", 4)
    assert native("unified", "flashinfer", 4, sinks=False)


def test_flashinfer_pages_are_one_token_on_any_layout():
    rig = Rig("unified_token_major", "flashinfer", page_size=4)
    view = rig.pool.k_view(1)
    pages = flashinfer._one_token_pages(view)
    assert pages.shape == (view.shape[0], 1, *view.shape[1:])
    assert pages.stride()[:2] == (view.stride(0), view.stride(0))
    assert pages.data_ptr() == view.data_ptr()


@MODES
def test_lanes_read_what_their_requests_read(mode):
    """One query token per lane is the same attention, so the oracle gives the same answer from both."""
    rig = Rig(mode, "trtllm_mha", page_size=16, context=160)
    rig.step({1: 17, 2: 40})
    step = rig.step({1: 5, 2: 19, 3: 1}, evict=False)
    lanes = rig.attention.plan(step.batch.as_lanes())
    assert lanes.seq_lens.tolist() == [*range(18, 23), *range(41, 60), 1]
    assert lanes.page_table.is_contiguous()
    assert lanes.page_table.shape == (25, 4)
    for layer in rig.layers:
        step.out[layer.index] = execute(lanes, layer, step.q[layer.index], rig.pool)
    step.assert_earned()


def test_trtllm_launches_many_lanes_in_parts(on_gpu, monkeypatch):
    on_gpu(HOPPER)
    monkeypatch.setattr(trtllm_mha, "MAX_ROWS", 7)
    rig = native("unified", "trtllm_mha", 16)
    rig.step({1: 17, 2: 40}).assert_earned()
    rig.step(dict.fromkeys(range(1, 9), 1)).assert_earned()


@MODES
def test_trtllm_tables_are_packed_and_end_in_the_sink(mode):
    rig = Rig(mode, "trtllm_mha", page_size=16, context=160)
    rig.attention.capture(3)
    rig.step({1: 100, 2: 90, 3: 20})
    metadata = rig.attention.replay(rig.batch({1: 1, 2: 1, 3: 1}))
    rig.release(1)
    for again in (rig.attention.replay(rig.batch({2: 1, 3: 1, 4: 1})), rig.attention.plan(rig.batch({2: 1, 3: 1}))):
        for table in (again.page_table, again.window_page_table):
            assert table.is_contiguous()
            assert table.stride(0) == table.shape[1]
            assert table.dtype == torch.int32
            for request, seq_len in enumerate(again.seq_lens.tolist()):
                assert not table[request, -(-seq_len // 16) :].any(), "an entry of an earlier batch is still there"
    assert metadata.page_table[0, 0] > 0
    assert not metadata.page_table[2, 1:].any()


def test_trtllm_refuses_rows_that_are_not_packed(on_gpu):
    on_gpu(HOPPER)
    rig = native("unified", "trtllm_mha", 16)
    rig.step({1: 40, 2: 3})
    metadata = rig.attention.plan(rig.batch({1: 1, 2: 1}))
    wide = torch.zeros(2, 9, dtype=torch.int32)
    wide[:, :3] = metadata.page_table
    object.__setattr__(metadata, "page_table", wide[:, :3])
    q, k = rig.randn(2, rig.q_heads), rig.randn(2, rig.kv_heads)
    with pytest.raises(InvariantError, match="page table: row stride 9 != 3 columns"):
        rig.attention.forward(rig.layers[0], q, k, k, metadata)


@pytest.mark.parametrize("backend", ["flashinfer", "trtllm_mha", "fa4"])
def test_the_engine_serves_the_same_tokens(backend):
    """Chunked prefill, captured decode and churn, by the metadata of each backend on each pool."""
    static = served("static", backend=backend, page_size=16)
    unified = served("unified", backend=backend, page_size=16)
    assert torch.equal(unified[1], static[1])
    assert unified[2].churn.moved_share >= 0.5
    assert static[0] == served("static", page_size=16)[0]
