"""The vendors' MLA kernels: our calls through stand-ins that know their rules, captures, lanes, refusals."""

import dataclasses
import inspect
import re

import pytest
import torch

from suite.errors import InvariantError
from suite.kernels.attention import cutedsl_mla, fa3, flashinfer_mla, flashmla, support, tokenspeed_mla, trtllm_mla
from suite.kernels.attention.support import backend_class
from suite.kernels.batch import ForwardMode
from suite.kernels.geometry import KVGeometry, RunnerGeometry
from suite.kernels.ids import KVKind
from tests import mla_vendor as vendor
from tests.mla_rig import MODES, LatentRig

HOPPER, BLACKWELL, RTX = (9, 0), (10, 0), (12, 0)
CASES = [
    ("fa3", HOPPER, 1),
    ("fa3", HOPPER, 16),
    ("flashmla", HOPPER, 64),
    ("flashinfer_mla", HOPPER, 1),
    ("flashinfer_mla", HOPPER, 12),
    ("trtllm_mla", BLACKWELL, 32),
    ("trtllm_mla", RTX, 64),
    ("cutedsl_mla", BLACKWELL, 64),
    ("tokenspeed_mla", BLACKWELL, 32),
]
VENDORS = pytest.mark.parametrize(
    ("backend", "capability", "page_size"), CASES, ids=[f"{name}-sm{gpu[0]}0-{size}" for name, gpu, size in CASES]
)
ALL_MODES = pytest.mark.parametrize("mode", MODES)
BLACKWELL_ONLY = ("trtllm_mla", "cutedsl_mla", "tokenspeed_mla")


@pytest.fixture
def on_gpu(monkeypatch):
    """Make the CPU pass for a GPU of some capability whose libraries are the stand-ins."""

    def install(capability: tuple[int, int]) -> tuple[list[str], vendor.FlashMla]:
        for module in (support, trtllm_mla):
            monkeypatch.setattr(module, "gpu_capability", lambda: capability)
        for module in (fa3, flashinfer_mla, flashmla, tokenspeed_mla, trtllm_mla):
            monkeypatch.setattr(module, "native_refusal", lambda name, device: None)
        for module in (fa3, flashinfer_mla, flashmla, trtllm_mla):
            monkeypatch.setattr(module, "row_refusal", lambda name, geometry, dtypes=(): None)
        for module in (flashinfer_mla, trtllm_mla):
            monkeypatch.setattr(module, "WORKSPACE_BYTES", 1024)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        return vendor.stand_in(monkeypatch)

    return install


@pytest.mark.parametrize("name", vendor.RECORDED)
def test_the_recorded_contract_is_the_installed_one(name):
    real = vendor.REAL[name]
    if real is None:
        pytest.skip(f"needs {name.partition(':')[0]} to compare with, which is not installed")
    theirs = {one.name: one.default is inspect.Parameter.empty for one in real.parameters.values()}
    ours = {one.name: one.default is inspect.Parameter.empty for one in vendor.recorded(name).parameters.values()}
    assert ours.items() <= theirs.items()


@VENDORS
@ALL_MODES
def test_the_vendor_call(on_gpu, backend, capability, page_size, mode):
    on_gpu(capability)
    rig = LatentRig(mode, backend, "native", page_size, context=300, requests=4)
    rig.step({4: 30, 1: 13, 2: 140, 3: 1}).assert_earned()
    rig.release(4)
    rig.move()
    for work in ({1: 1, 2: 1, 3: 1}, {2: 4, 1: 4}, {3: 2, 1: 3, 2: 1}, {1: 20, 3: 20}):
        rig.step(work).assert_earned()
    rig.step({2: 4, 1: 4}, mode=ForwardMode.VERIFY).assert_earned()


@VENDORS
@pytest.mark.parametrize("new", [1, 3, 17], ids=["decode", "verify", "long_verify"])
def test_captured_calls_follow_lengths_and_moves(on_gpu, backend, capability, page_size, new):
    _, flash_mla = on_gpu(capability)
    mode = ForwardMode.DECODE if new == 1 else ForwardMode.VERIFY
    rig = LatentRig("unified", backend, "native", page_size, context=260, requests=4)
    rig.attention.capture(3, new)
    rig.step({4: 30, 1: 13, 2: 140, 3: 1})
    rig.step({1: new, 2: new}, mode=mode, replay=True, pad_to=3).assert_earned()
    before = flash_mla.scheduled, vendor.MlaWrapper.plans
    rig.release(4)
    for _ in range(2):
        rig.move()
        rig.step({2: new, 1: new}, mode=mode, replay=True, pad_to=3).assert_earned()
    # one schedule per batch, however many layers there are
    after = flash_mla.scheduled, vendor.MlaWrapper.plans
    assert after[0] == before[0] + 2 * (backend == "flashmla")
    assert after[1] == before[1] + 2 * (backend == "flashinfer_mla")
    # and made by the replay: a graph that runs next schedules nothing
    rig.attention.replay(rig.batch({1: new, 2: new}, mode, pad_to=3))
    assert flash_mla.scheduled == after[0] + (backend == "flashmla")
    assert vendor.MlaWrapper.plans == after[1] + (backend == "flashinfer_mla")


def test_nothing_is_scheduled_inside_a_graph_capture(on_gpu, monkeypatch):
    on_gpu(HOPPER)
    rig = LatentRig("unified", "flashmla", "native", 64, context=200, depth=1)
    rig.attention.capture(3)
    rig.step({1: 3, 2: 4, 3: 5})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(InvariantError, match="needs a forward of every captured batch size"):
        rig.step({1: 1, 2: 1}, replay=True)


def test_flashmla_cuts_many_lanes_into_launches(on_gpu, monkeypatch):
    _, flash_mla = on_gpu(HOPPER)
    monkeypatch.setattr(flashmla, "MAX_ROWS", 8)
    rig = LatentRig("unified", "flashmla", "native", 64, context=100, requests=2)
    rig.step({1: 17, 2: 3}).assert_earned()
    assert flash_mla.scheduled == 3


@pytest.mark.parametrize(
    ("backend", "decode", "extend"),
    [("trtllm_mla", "auto", "auto"), ("cutedsl_mla", "cute-dsl", "auto"), ("tokenspeed_mla", "tokenspeed", "auto")],
)
@pytest.mark.parametrize(
    ("work", "mode"),
    [({1: 4, 2: 4}, ForwardMode.VERIFY), ({1: 3, 2: 1}, ForwardMode.EXTEND)],
    ids=["verify", "ragged"],
)
def test_who_decodes_and_who_extends(on_gpu, backend, decode, extend, work, mode):
    calls, _ = on_gpu(BLACKWELL)
    rig = LatentRig("unified", backend, "native", 32, depth=1)
    rig.step(work, mode=mode)
    rig.step({1: 1, 2: 1})
    assert calls == [extend, decode]


def geometry(**change) -> RunnerGeometry:
    full = KVGeometry(
        kind=KVKind.FULL, layers=(0,), kv_heads=1, head_dim=576, v_head_dim=512, dtype=torch.bfloat16, page_size=64,
        is_latent=True,
    )  # fmt: skip
    return RunnerGeometry(full=dataclasses.replace(full, **change))


@pytest.mark.parametrize(
    ("backend", "launcher", "capability", "change", "reason"),
    [
        ("flashmla", "reference", None, {"page_size": 32}, "flashmla: needs page size 64, got 32"),
        ("trtllm_mla", "reference", None, {"page_size": 16}, "trtllm_mla: needs page size 32 or 64, got 16"),
        ("fa3", "reference", None, {"page_size": 12}, "fa3: needs a page size that is a power of two, got 12"),
        (
            "fa3",
            "native",
            HOPPER,
            {"head_dim": 48, "v_head_dim": 32},
            "fa3: needs latent rows of 512 . 64, got 32 . 16",
        ),
        ("fa3", "native", (8, 0), {}, "fa3: needs sm_90 for MLA, got sm_80"),
        ("flashmla", "native", HOPPER, {"dtype": torch.float32}, "flashmla: needs .*bfloat16, got torch.float32"),
        ("flashinfer_mla", "native", HOPPER, {"head_dim": 544}, "flashinfer_mla: .* 512 . 64, got 512 . 32"),
        *((name, "native", HOPPER, {}, f"{name}: needs sm_100.*, got sm_90") for name in BLACKWELL_ONLY),
    ],
)
def test_refusals_state_need_and_got(monkeypatch, backend, launcher, capability, change, reason):
    if capability is not None:
        monkeypatch.setattr(support, "gpu_capability", lambda: capability)
    device = "cpu" if capability is None else "cuda"
    got = backend_class(backend).refusal(geometry(**change), "unified", device, launcher, False)
    assert got is not None
    assert re.match(reason, got), got


@pytest.mark.parametrize("name", ["flashmla", "flashinfer_mla", *BLACKWELL_ONLY])
def test_they_serve_latent_rows_only_and_no_sinks(name):
    backend = backend_class(name)
    plain = {"is_latent": False, "v_head_dim": None, "head_dim": 64}
    assert backend.refusal(geometry(), "unified", "cpu", "reference", False) is None
    assert f"{name}: needs MLA, got MHA" == backend.refusal(geometry(**plain), "unified", "cpu", "reference", False)
    assert "needs a model without sinks" in backend.refusal(geometry(), "unified", "cpu", "reference", True)
    assert backend.refusal(geometry(), "unified", "cpu", "native", False).startswith(f"{name}: needs ")


def test_tokenspeed_needs_what_its_extends_run_on(monkeypatch):
    answers = {"tokenspeed_mla": None, "trtllm_mla": "trtllm_mla: needs the package flashinfer-python, got none"}
    monkeypatch.setattr(tokenspeed_mla, "native_refusal", lambda name, device: answers[name])
    got = backend_class("tokenspeed_mla").launchers("cuda")["native"]
    assert got == f"tokenspeed_mla: needs what its extends run on, got {answers['trtllm_mla']}"
    assert cutedsl_mla.CuteDslMlaBackend.name == "cutedsl_mla"
