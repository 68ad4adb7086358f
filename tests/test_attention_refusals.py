"""Who may serve what, with need and got; and the vendor call that a CPU machine can only spell."""

import dataclasses
import importlib.util
import re
import sys
import types

import pytest
import torch

from suite.errors import RefusedError, UnknownNameError
from suite.kernels.attention import fa3
from suite.kernels.attention import triton as triton_backend
from suite.kernels.attention.base import PageTableMetadata
from suite.kernels.attention.reference import execute
from suite.kernels.attention.support import BACKENDS, backend_class
from suite.kernels.geometry import KVGeometry, RunnerGeometry
from suite.kernels.ids import KVKind
from tests.attention_rig import Rig


def geometry(**change) -> RunnerGeometry:
    full = KVGeometry(kind=KVKind.FULL, layers=(0,), kv_heads=2, head_dim=64, dtype=torch.bfloat16, page_size=4)
    return RunnerGeometry(full=dataclasses.replace(full, **change))


def refusal(backend: str, launcher: str, device: str = "cpu", **change) -> str | None:
    return backend_class(backend).refusal(geometry(**change), "unified", device, launcher, True)


def test_what_serves_on_a_cpu():
    assert refusal("reference", "reference") is None
    assert refusal("triton", "interpreter") is None
    assert refusal("triton", "reference") is None
    assert refusal("fa3", "reference") is None


@pytest.mark.parametrize(
    ("backend", "launcher", "change", "reason"),
    [
        ("reference", "native", {}, "reference: needs launcher reference, got native"),
        ("triton", "native", {}, "triton: needs compiled kernels on CUDA, got cpu"),
        ("triton", "interpreter", {"head_dim": 512}, "triton: needs head_dim <= 256, got 512"),
        ("triton", "interpreter", {"dtype": torch.int8}, "triton: needs torch.float16 or .* got torch.int8"),
        ("triton", "interpreter", {"v_head_dim": 32}, "triton: needs equal K and V rows on .*, got 256 and 128 bytes"),
        ("fa3", "native", {}, "fa3: needs sm_80 to sm_90, got cpu"),
        ("fa3", "interpreter", {}, "fa3: needs launcher native or reference, got interpreter"),
        ("fa3", "reference", {"page_size": 12}, "fa3: needs a page size that is a power of two, got 12"),
        ("fa3", "reference", {"head_dim": 320}, "fa3: needs a head_dim that is a multiple of 8, at most 256, got 320"),
        ("fa3", "native", {"dtype": torch.float32}, "fa3: needs torch.float16 or torch.bfloat16, got torch.float32"),
    ],
)
def test_refusals_state_need_and_got(backend, launcher, change, reason):
    got = refusal(backend, launcher, **change)
    assert got is not None
    assert re.fullmatch(reason, got), got


def test_every_refused_launcher_has_a_reason(monkeypatch):
    for name in BACKENDS:
        for device in ("cpu", "cuda"):
            launchers = backend_class(name).launchers(device)
            assert launchers["reference"] is None
            assert all(reason is None or reason.startswith(f"{name}: needs ") for reason in launchers.values())
    monkeypatch.setattr(triton_backend, "interpreter_reason", lambda name: f"{name}: needs TRITON_INTERPRET=1")
    assert "TRITON_INTERPRET=1" in refusal("triton", "interpreter")


def test_fa3_names_architecture_and_package(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert refusal("fa3", "native", "cuda") == "fa3: needs sm_80 to sm_90, got sm_100"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert refusal("fa3", "native", "cuda") == "fa3: needs the package sglang-kernel, got none installed"


def test_a_refused_backend_is_never_built():
    with pytest.raises(RefusedError, match="fa3: needs a page size that is a power of two, got 3"):
        Rig("static", "fa3", page_size=3)
    with pytest.raises(UnknownNameError, match="did you mean 'triton'"):
        backend_class("tritton")


@pytest.mark.parametrize("window", [None, 10])
def test_the_vendor_call(monkeypatch, window):
    """A stand-in with FA3's signature reads our arguments by its own rules; the answer must be right."""

    def stand_in(
        *, q, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, max_seqlen_q, softmax_scale, causal,
        window_size, sinks,
    ):  # fmt: skip
        assert causal
        assert page_table.dtype == cache_seqlens.dtype == cu_seqlens_q.dtype == torch.int32
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        assert sinks.dtype == torch.bfloat16
        left, right = window_size
        assert right == (-1 if left == -1 else 0)
        pool = types.SimpleNamespace(
            k_view=lambda layer: k_cache.flatten(0, 1).clone(), v_view=lambda layer: v_cache.flatten(0, 1).clone()
        )
        layer = dataclasses.replace(
            rig.layers[0], scale=softmax_scale, window=None if left == -1 else left + 1, sinks=sinks.float()
        )
        metadata = dataclasses.replace(
            rig.attention.plan(batch), page_size=k_cache.shape[1], page_table=page_table, window_page_table=page_table
        )
        return execute(metadata, layer, q, pool)

    module = types.ModuleType("sgl_kernel.flash_attn")
    module.flash_attn_with_kvcache = stand_in
    monkeypatch.setitem(sys.modules, "sgl_kernel", types.ModuleType("sgl_kernel"))
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", module)
    monkeypatch.setattr(fa3, "native_refusal", lambda name, device: None)
    rig = Rig("unified", "fa3", "native", dtype=torch.bfloat16, window=window)
    oracle = Rig("unified", "fa3", "reference", dtype=torch.bfloat16, window=window)
    for work in ({1: 13, 2: 30}, {1: 1, 2: 1}):
        expected = oracle.step(work, evict=False)
        batch = rig.batch(work)
        metadata = rig.attention.plan(batch)
        assert isinstance(metadata, PageTableMetadata)
        tokens = sum(work.values())
        for layer in rig.layers:
            q = expected.q[layer.index]
            ids = expected.metadata.write_ids_of(layer.kind).tensor
            k, v = oracle.pool.k_view(layer.index)[ids], oracle.pool.v_view(layer.index)[ids]
            out = rig.attention.forward(layer, q, k, v, metadata)
            assert torch.equal(out[:tokens], expected.out[layer.index])
        for one in (rig, oracle):
            one.evict(work)
