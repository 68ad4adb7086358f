"""Who serves linear attention, with need and got; and FlashInfer's call, which a CPU machine can only spell."""

import dataclasses
import re
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from suite.errors import InputError, RefusedError
from suite.kernels.linear import LINEAR_BACKENDS, base, gdn, linear_backend_class
from suite.kernels.linear.lightning import alibi_slopes, layer_factor
from suite.kernels.linear.metadata import Tracking
from suite.kernels.linear.stamp import LinearAttnFlags, resolve, stamp_runner
from suite.kernels.ops.delta_chunk import ChunkPlan, delta_chunk_torch
from suite.kernels.ops.delta_step import StepInputs
from suite.kernels.pools.state import KernelSlots, StateGeometry, StatePool
from tests.attention_vendor import bound

GDN = StateGeometry(layers=(0,), conv_dim=8192, v_heads=32, v_dim=128, k_dim=128)
SHAPES = {
    "gdn": GDN,
    "ascend_gdn": GDN,
    "kda": dataclasses.replace(GDN, conv_dim=12288, taps_first=True),
    "lightning": dataclasses.replace(GDN, conv_dim=0),
}
BF16 = torch.bfloat16


def refusal(name, launcher="reference", device="cpu", *, shape=None, topk=0, deterministic=False, **flags):
    geometry = dataclasses.replace(SHAPES[name], **(shape or {}))
    return linear_backend_class(name).refusal(
        resolve(LinearAttnFlags(**flags)), geometry, device, launcher, topk=topk, deterministic=deterministic
    )


def test_what_serves_on_a_cpu():
    for name in ("gdn", "kda", "lightning"):
        assert refusal(name, "reference") is None
        assert refusal(name, "interpreter") is None
        assert refusal(name, topk=1) is None
    assert refusal("gdn", topk=4) is None
    assert refusal("kda", topk=4) is None
    assert refusal("gdn", prefill="flashinfer") is None


@pytest.mark.parametrize(
    ("name", "how", "reason"),
    [
        ("gdn", {"launcher": "native"}, "gdn: needs compiled kernels on CUDA, got cpu"),
        ("gdn", {"decode": "cutedsl"}, "gdn: needs decode kernel triton, got cutedsl"),
        ("gdn", {"prefill": "helion"}, "gdn: needs prefill kernel triton or flashinfer, got helion"),
        ("gdn", {"decode": "flashinfer"}, "gdn: needs decode kernel triton, got flashinfer"),
        ("gdn", {"verify": "flashinfer"}, "gdn: needs verify kernel triton, got flashinfer"),
        ("gdn", {"prefill": "flashinfer", "deterministic": True}, "gdn: needs .* deterministic, got flashinfer"),
        (
            "gdn",
            {"prefill": "flashinfer", "launcher": "interpreter"},
            "gdn: needs launcher native or reference for flashinfer prefill, got interpreter",
        ),
        (
            "gdn",
            {"prefill": "flashinfer", "shape": {"k_dim": 64}},
            r"gdn: needs k_dim and v_dim of 128 for flashinfer prefill, got \(64, 128\)",
        ),
        (
            "gdn",
            {"prefill": "flashinfer", "shape": {"temporal_dtype": BF16}},
            "gdn: needs fp32 states for flashinfer prefill, got torch.bfloat16",
        ),
        ("gdn", {"shape": {"conv_width": 64}}, "gdn: needs a convolution window < 64, got 64"),
        ("gdn", {"shape": {"conv_dim": 0}}, r"gdn: needs convolution windows \[dim, width\], got a pool without .*"),
        ("gdn", {"shape": {"taps_first": True}}, r"gdn: needs .* \[dim, width\], got \[width, dim\]"),
        ("kda", {"shape": {"taps_first": False}}, r"kda: needs .* \[width, dim\], got \[dim, width\]"),
        ("gdn", {"launcher": "interpreter", "shape": {"k_dim": 256}}, "gdn: needs k_dim and v_dim <= 128, got 256"),
        (
            "kda",
            {"launcher": "interpreter", "shape": {"temporal_dtype": BF16}},
            "kda: needs fp32 states under the interpreter, which truncates, got torch.bfloat16",
        ),
        ("kda", {"verify": "flashinfer", "topk": 2}, "kda: needs topk <= 1 for flashinfer verify, .* got 2"),
        ("kda", {"verify": "flashinfer", "topk": 1}, "kda: needs verify kernel triton, got flashinfer"),
        ("kda", {"prefill": "flashkda"}, "kda: needs prefill kernel triton, got flashkda"),
        ("lightning", {"topk": 2}, "lightning: needs topk <= 1, its verify is a chain, got 2"),
        ("lightning", {"shape": {"conv_dim": 64}}, "lightning: needs a pool without convolution, got conv_dim 64"),
        ("ascend_gdn", {}, "ascend_gdn: needs the package torch_npu, got none installed"),
        ("ascend_gdn", {"launcher": "native"}, "ascend_gdn: needs the package torch_npu, got none installed"),
    ],
)
def test_refusals_state_need_and_got(name, how, reason):
    got = refusal(name, **how)
    assert got is not None
    assert re.fullmatch(reason, got), got


def test_every_refused_launcher_has_a_reason(monkeypatch):
    for name in LINEAR_BACKENDS:
        for device in ("cpu", "cuda"):
            reasons = linear_backend_class(name).launchers(device).values()
            assert all(reason is None or reason.startswith(f"{name}: needs ") for reason in reasons)
    monkeypatch.setattr(base, "interpreter_reason", lambda name: f"{name}: needs TRITON_INTERPRET=1")
    assert "TRITON_INTERPRET=1" in refusal("gdn", "interpreter")


def test_ascend_with_its_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert refusal("ascend_gdn") == "ascend_gdn: needs device npu, got cpu"
    assert refusal("ascend_gdn", device="npu") is None
    assert refusal("ascend_gdn", "native", "npu") == "ascend_gdn: needs launcher reference, got native"
    assert "prefill kernel triton, got flashinfer" in refusal("ascend_gdn", device="npu", prefill="flashinfer")


def test_flashinfer_names_architecture_and_package(monkeypatch):
    def ask():
        return gdn.flashinfer_refusal(GDN, "cuda", "native", deterministic=False)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert ask() == "gdn: needs sm_90 for flashinfer prefill with fp32 states, got sm_100"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(gdn.importlib.util, "find_spec", lambda name: None)
    assert ask() == "gdn: needs the package flashinfer-python for flashinfer prefill, got none installed"
    monkeypatch.setattr(gdn.importlib.util, "find_spec", lambda name: None if "gdn" in name else object())
    assert ask() == "gdn: needs a flashinfer with gdn_prefill, got one without"
    monkeypatch.setattr(gdn.importlib.util, "find_spec", lambda name: object())
    assert ask() is None


def backend(name="gdn", **how):
    runner = SimpleNamespace()
    stamp_runner(runner, resolve(LinearAttnFlags(**how.pop("flags", {}))))
    pool = StatePool.static(
        dataclasses.replace(SHAPES[name], v_heads=1, conv_dim=384 * (name != "lightning")), 2, "cpu"
    )
    return linear_backend_class(name)(runner=runner, pool=pool, launcher="reference", **how)


def test_a_refused_backend_is_never_built():
    with pytest.raises(RefusedError, match="lightning: needs topk <= 1"):
        backend("lightning", topk=3)
    with pytest.raises(RefusedError, match="gdn: needs prefill kernel triton to be deterministic"):
        backend(flags={"prefill": "flashinfer"}, deterministic=True)


def test_the_vendor_call(monkeypatch):
    """A stand-in with FlashInfer's signature reads our arguments by its own rules; the answer must be right."""

    def chunk_gated_delta_rule(**kwargs):
        call = bound("flashinfer.gdn_prefill:chunk_gated_delta_rule", **kwargs)
        q, k, v, g, beta, initial_state = (call[name] for name in ("q", "k", "v", "g", "beta", "initial_state"))
        scale, cu_seqlens, output_state = call["scale"], call["cu_seqlens"], call["output_state"]
        assert all(tensor.is_contiguous() for tensor in (q, k, v, g, beta, initial_state))
        assert g.dtype == beta.dtype == initial_state.dtype == torch.float32
        assert cu_seqlens.dtype == torch.int64
        assert q.dtype == v.dtype == torch.bfloat16
        assert not call.get("use_qk_l2norm_in_kernel")  # not every architecture's kernel heeds it
        assert call["output_final_state"]
        out, groups = torch.empty_like(v), v.shape[1] // k.shape[1]
        for sequence in range(cu_seqlens.numel() - 1):
            state = initial_state[sequence].clone()
            for t in range(int(cu_seqlens[sequence]), int(cu_seqlens[sequence + 1])):
                for head in range(v.shape[1]):
                    key = k[t, head // groups].float()
                    state[head] *= g[t, head]
                    new = beta[t, head] * (v[t, head].float() - state[head] @ key)
                    state[head] += torch.outer(new, key)
                    out[t, head] = (state[head] @ q[t, head // groups].float() * scale).bfloat16()
            output_state[sequence] = state
        return out, output_state

    module = types.ModuleType("flashinfer.gdn_prefill")
    module.chunk_gated_delta_rule = chunk_gated_delta_rule
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.gdn_prefill", module)
    served = backend(flags={"prefill": "flashinfer"})
    served.launcher = "native"  # past the refusal: this machine has no GPU
    torch.manual_seed(0)
    packed = torch.randn(9, 4, 128).bfloat16()
    inputs = StepInputs(q=packed[:, :1], k=packed[:, 1:2], v=packed[:, 2:], g=-torch.rand(9, 2), beta=torch.rand(9, 2))
    initial, lens = torch.randn(2, 2, 128, 128), (4, 5)
    plan = ChunkPlan.create(lens, torch.device("cpu"))
    got = served.prefill(inputs, initial, plan, torch.tensor([0, 4, 9], dtype=torch.int32))
    want = delta_chunk_torch(inputs, initial, plan)
    rounding = torch.finfo(BF16).eps  # of q and k, which the kernel takes in bf16
    assert (got.final - want.final).abs().max() <= 2 * rounding * want.final.abs().max()
    assert (got.out.float() - want.out.float()).abs().max() <= 2 * rounding * want.out.abs().max()
    with pytest.raises(RefusedError, match="needs prefill kernel triton to keep chunk-boundary states"):
        served.plan(None, None, tracking=Tracking(requests=(0,), tokens=(64,), slots=KernelSlots(torch.tensor([1]))))


def test_lightning_slopes():
    assert alibi_slopes(8) == pytest.approx([2.0**-i for i in range(1, 9)])
    assert alibi_slopes(4) == pytest.approx([2.0 ** (-2 * i) for i in range(1, 5)])
    assert alibi_slopes(6) == pytest.approx([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])
    assert alibi_slopes(1) == pytest.approx([2**-8])
    assert layer_factor(0, 5) == 1 + 1e-5
    assert layer_factor(4, 5) == pytest.approx(1e-5)
    assert layer_factor(3, 5, layerwise=False) == 1.0
    with pytest.raises(InputError, match="layer: got 5, expected 0 to 4"):
        layer_factor(5, 5)
    with pytest.raises(InputError, match="heads: got 0"):
        alibi_slopes(0)
