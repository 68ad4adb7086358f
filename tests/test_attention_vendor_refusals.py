"""What flashinfer, trtllm_mha and fa4 refuse on a GPU, with need and got."""

import re

import pytest
import torch

from suite.kernels.attention import fa4, support, trtllm_mha
from suite.kernels.attention.support import backend_class
from tests.test_attention_refusals import geometry

HOPPER, BLACKWELL = (9, 0), (10, 0)


@pytest.mark.parametrize(
    ("backend", "capability", "change", "reason"),
    [
        ("trtllm_mha", HOPPER, {"page_size": 128}, "needs page size 16, 32 or 64 on sm_90, got 128"),
        ("trtllm_mha", (12, 0), {"page_size": 128}, "needs page size 16, 32 or 64 on sm_120, got 128"),
        ("trtllm_mha", BLACKWELL, {"page_size": 128}, None),
        ("trtllm_mha", HOPPER, {"page_size": 8}, "needs page size 16, 32, 64 or 128, got 8"),
        (
            "trtllm_mha",
            HOPPER,
            {"page_size": 16, "head_dim": 40},
            "needs a head_dim that is a multiple of 16, .* got 40",
        ),
        (
            "trtllm_mha",
            HOPPER,
            {"page_size": 16, "dtype": torch.float32},
            "needs torch.float16 or .*, got torch.float32",
        ),
        ("trtllm_mha", (8, 0), {"page_size": 16}, "needs sm_90, .* got sm_80"),
        ("fa4", BLACKWELL, {"page_size": 16}, "needs page size 128 on sm_100, got 16"),
        ("fa4", HOPPER, {"page_size": 12}, "needs .* got 12"),
        ("fa4", (8, 0), {"page_size": 16}, "needs sm_90 or sm_100 .*, got sm_80"),
        ("fa4", HOPPER, {"head_dim": 24}, "needs a head_dim that is a multiple of 16, at most 256, got 24 and 24"),
        (
            "fa4",
            BLACKWELL,
            {"head_dim": 192, "page_size": 128},
            "needs a head_dim that is at most 128, .* got 192 and 192",
        ),
        ("fa4", HOPPER, {"dtype": torch.float32}, "needs torch.float16 or torch.bfloat16, got torch.float32"),
        ("flashinfer", HOPPER, {"head_dim": 80}, "needs head_dim 64 or 128 or 256, got 80"),
        ("flashinfer", HOPPER, {"dtype": torch.float32}, "needs torch.float16 or torch.bfloat16, got torch.float32"),
        ("flashinfer", HOPPER, {"v_head_dim": 32}, "needs equal K and V rows.*, got 256 and 128 bytes"),
    ],
    ids=str,
)
def test_refusals_on_a_gpu(monkeypatch, backend, capability, change, reason):
    for module in (support, fa4, trtllm_mha):
        monkeypatch.setattr(module, "gpu_capability", lambda: capability)
    monkeypatch.setattr(support, "_installed", lambda module: True)
    got = backend_class(backend).refusal(geometry(**change), "unified", "cuda", "native", False)
    if reason is None:
        assert got is None
    else:
        assert got is not None
        assert re.fullmatch(f"{backend}: {reason}", got), got


@pytest.mark.parametrize(
    ("backend", "module", "package"),
    [("flashinfer", "flashinfer", "flashinfer-python"), ("fa4", "flash_attn", "flash-attn-4")],
)
def test_a_missing_package_is_named(monkeypatch, backend, module, package):
    monkeypatch.setattr(support, "gpu_capability", lambda: HOPPER)
    monkeypatch.setattr(support, "_installed", lambda name: not name.startswith(module))
    got = backend_class(backend).launchers("cuda")["native"]
    assert got == f"{backend}: needs the package {package}, got none installed"
