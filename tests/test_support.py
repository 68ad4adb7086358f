"""The one table: its allow-lists, its guards, and everything that is said from it."""

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch

from suite.e2e.report.doctor import doctor_row
from suite.errors import UnknownNameError
from suite.kernels.attention.facts import FAMILIES, Kernels, Pages, needed
from suite.kernels.attention.support import (
    BACKENDS,
    GUARDS,
    SUPPORT,
    Launch,
    backend_class,
    launch_refusal,
    native_refusal,
    table_refusal,
    unified_allow_list,
)
from suite.kernels.attention.support_page import page
from suite.kernels.geometry import KVGeometry, RunnerGeometry
from suite.kernels.ids import KVKind
from suite.records import POOL_MODES

PAGE = Path(__file__).parents[1] / "docs" / "backends.md"
ELEVEN = {
    *("reference", "triton", "fa3", "fa4", "flashinfer", "flashinfer_mla", "trtllm_mha"),
    *("trtllm_mla", "cutedsl_mla", "tokenspeed_mla", "flashmla"),
}
UNIFIED_MLA = {"triton", "fa3", "trtllm_mla", "flashinfer", "cutedsl_mla", "tokenspeed_mla", "flashmla"}
UNIFIED_UNIFORM = {"triton", "fa3", "fa4", "flashinfer", "trtllm_mha"}


def geometry(window: int | None = None, **change) -> RunnerGeometry:
    full = KVGeometry(kind=KVKind.FULL, layers=(0,), kv_heads=1, head_dim=64, dtype=torch.bfloat16, page_size=64)
    full = dataclasses.replace(full, **change)
    if window is None:
        return RunnerGeometry(full=full)
    return RunnerGeometry(full=full, window=dataclasses.replace(full, kind=KVKind.WINDOW, layers=(1,), window=window))


def latent(**change) -> RunnerGeometry:
    return geometry(head_dim=576, v_head_dim=512, is_latent=True, **change)


def test_the_table_lists_all_backends_and_every_registered_one_is_in_it():
    assert set(SUPPORT) == ELEVEN
    assert set(BACKENDS) <= ELEVEN
    assert all(backend_class(name).name == name for name in BACKENDS)


def test_the_allow_lists_hold_exactly():
    assert unified_allow_list("MLA") == UNIFIED_MLA
    assert unified_allow_list("MHA") == unified_allow_list("SWA") == UNIFIED_UNIFORM
    assert unified_allow_list("MHA", unequal_rows=True) == {"triton", "fa3", "fa4"}


@pytest.mark.parametrize("pool", POOL_MODES)
def test_guards_and_allow_lists_agree(pool):
    """What the lists allow is launched, what they do not is refused, for every backend and family."""
    asks = {"MHA": geometry(page_size=64), "SWA": geometry(32, page_size=64), "MLA": latent()}
    for family, shape in asks.items():
        for name, line in SUPPORT.items():
            allowed = line.oracle or (
                (line.typed or name) in unified_allow_list(family) and not (name == "flashinfer" and family == "MLA")
            )
            if name == "flashinfer_mla" and family != "MLA":
                allowed = False
            size = 128 if name == "fa4" else 64
            launch = dataclasses.replace(Launch.of(shape, pool, sinks=False), page_size=size)
            assert (launch_refusal(name, launch) is None) == allowed, (name, family)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("fa4", {"families": ("MLA",)}, "fa4: needs MHA or SWA, got MLA"),
        ("flashmla", {"families": ("MHA", "SWA")}, "flashmla: needs MLA, got MHA"),
        ("flashinfer_mla", {"families": ("MLA",), "sinks": True}, "needs a model without sinks, got one with them"),
        ("fa3", {"unequal_rows": (256, 128)}, "fa3: needs equal K and V rows on the unified pool, got 256 and 128 b"),
        ("flashinfer", {"unequal_rows": (256, 128), "pool": "static"}, "needs equal K and V rows, got 256 and 128 b"),
        ("trtllm_mha", {"unequal_rows": (256, 128), "pool": "unified_token_major"}, "needs equal K and V rows, got"),
        ("fa3", {"page_size": 12}, "fa3: needs a page size that is a power of two, got 12"),
        ("fa4", {"page_size": 12}, "fa4: needs a page size that is a power of two, got 12"),
        ("trtllm_mha", {"page_size": 1}, "trtllm_mha: needs page size 16, 32, 64 or 128, got 1"),
        ("trtllm_mla", {"families": ("MLA",), "page_size": 16}, "trtllm_mla: needs page size 32 or 64, got 16"),
        ("flashmla", {"families": ("MLA",), "page_size": 32}, "flashmla: needs page size 64, got 32"),
        ("triton", {"pool": "static", "page_major": True}, "needs pool unified for page-major pages, got static"),
        ("triton", {"local_attention": True}, "needs full or sliding-window attention on pool unified, got local (ch"),
        ("fa3", {"prefill_aware_window": True}, "needs a sliding window of one width on pool unified, got a prefill-"),
        ("fa4", {"prefill_aware_window": True}, "needs a sliding window of one width on pool unified, got a prefill-"),
    ],
)
def test_guards_state_need_and_got(name, change, reason):
    served = Launch(families=("MHA",) if "MHA" in SUPPORT[name].families else ("MLA",), page_size=64, pool="unified")
    assert launch_refusal(name, served) is None
    got = launch_refusal(name, dataclasses.replace(served, **change))
    assert got is not None
    assert got.startswith(f"{name}: needs ")
    assert reason in got


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("triton", {"unequal_rows": (256, 128), "pool": "unified_token_major"}),
        ("fa3", {"unequal_rows": (256, 128), "pool": "static"}),
        ("triton", {"page_major": True}),
        ("triton", {"local_attention": True, "pool": "static"}),
        ("fa3", {"prefill_aware_window": True, "pool": "static"}),
        ("triton", {"prefill_aware_window": True}),
        ("flashinfer", {"sinks": True}),
        ("triton", {"page_size": 3}),
    ],
)
def test_guards_refuse_no_more_than_they_say(name, change):
    launch = Launch(families=("MHA",), page_size=64, pool="unified")
    assert launch_refusal(name, dataclasses.replace(launch, **change)) is None


def test_a_pool_mode_that_a_backend_does_not_read(monkeypatch):
    only_static = dataclasses.replace(SUPPORT["fa4"], pool_modes=("static",))
    monkeypatch.setitem(SUPPORT, "fa4", only_static)
    launch = Launch(families=("MHA",), page_size=128, pool="unified")
    assert launch_refusal("fa4", launch) == "fa4: needs pool static, got unified"
    assert unified_allow_list("MHA") == UNIFIED_UNIFORM - {"fa4"}


def test_a_launch_is_read_from_the_geometry():
    assert Launch.of(geometry(), "static", False).families == ("MHA",)
    assert Launch.of(geometry(32), "static", True) == Launch(
        families=("MHA", "SWA"), page_size=64, pool="static", sinks=True
    )
    assert Launch.of(geometry(v_head_dim=32), "unified", False).unequal_rows == (128, 64)
    rows = Launch.of(latent(), "unified", False)
    assert (rows.families, rows.unequal_rows) == (("MLA",), None)  # a latent row's value lies in it
    with pytest.raises(UnknownNameError, match="did you mean 'flashmla'"):
        launch_refusal("flashmle", rows)


def gpu(monkeypatch, capability: tuple[int, int] | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


def test_native_kernels_add_the_page_sizes_of_this_gpu(monkeypatch):
    def ask(name: str, shape: RunnerGeometry, launcher: str = "native") -> str | None:
        return table_refusal(name, shape, "unified", "cuda", launcher, False)

    gpu(monkeypatch, (9, 0))
    big = geometry(page_size=128)
    assert ask("trtllm_mha", big) == "trtllm_mha: needs page size 16, 32 or 64 on sm_90, got 128"
    assert ask("trtllm_mha", big, "reference") is None
    assert ask("fa3", latent()) is None
    gpu(monkeypatch, (10, 3))
    assert ask("trtllm_mha", big) is None
    assert ask("fa4", geometry()) == "fa4: needs page size 128 on sm_103, got 64"
    assert ask("fa3", big) is None  # no kernels for this GPU at all: native_refusal says so
    gpu(monkeypatch, (8, 0))
    assert ask("fa3", latent()) == "fa3: needs sm_90 for MLA, got sm_80"
    gpu(monkeypatch, None)
    assert ask("trtllm_mha", big) is None
    assert table_refusal("trtllm_mha", big, "unified", "cpu", "native", False) is None


def test_native_refusals_name_gpu_and_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    gpu(monkeypatch, (9, 0))
    assert native_refusal("triton", "cuda") is None
    assert native_refusal("fa3", "cuda") == "fa3: needs the package sglang-kernel, got none installed"
    assert native_refusal("fa4", "cuda") == "fa4: needs the package flash-attn-4, got none installed"
    assert native_refusal("trtllm_mla", "cuda") == "trtllm_mla: needs sm_100 or newer, got sm_90"
    assert native_refusal("fa3", "cpu") == "fa3: needs sm_80 to sm_90, got cpu"
    gpu(monkeypatch, (12, 0))
    assert native_refusal("fa3", "cuda") == "fa3: needs sm_80 to sm_90, got sm_120"
    gpu(monkeypatch, None)
    assert native_refusal("flashinfer", "cuda") == "flashinfer: needs any CUDA GPU, got no GPU"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    gpu(monkeypatch, (10, 0))
    assert native_refusal("fa4", "cuda") is None


@pytest.mark.parametrize("name", BACKENDS)
def test_every_registered_backend_asks_the_table_first(name, monkeypatch):
    """Whatever the table refuses, the backend's own `refusal` refuses with the same words."""
    monkeypatch.setitem(GUARDS, "planted", lambda line, launch: "needs the planted, got none")
    shapes = [geometry(), geometry(16), latent(), geometry(page_size=12), geometry(v_head_dim=32)]
    seen = set()
    for shape in shapes:
        for pool in POOL_MODES:
            for sinks in (False, True):
                expected = table_refusal(name, shape, pool, "cpu", "reference", sinks)
                assert backend_class(name).refusal(shape, pool, "cpu", "reference", sinks) == expected
                seen.add(expected)
    assert f"{name}: needs the planted, got none" in seen


def test_doctor_says_the_families_of_the_table():
    for name in BACKENDS:
        assert doctor_row(name, "cpu")["family"] == ", ".join(SUPPORT[name].families)
        assert set(SUPPORT[name].families) <= set(FAMILIES)


def test_the_page_is_up_to_date():
    again = "python -m suite.kernels.attention.support_page > docs/backends.md"
    assert PAGE.read_text() == page(), f"write it again: {again}"
    assert all(f"| `{name}` |" in page() for name in ELEVEN)
    assert all(f"- {rule}\n" in page() for rule in GUARDS)


def test_page_sizes_and_gpus_in_words():
    assert needed([Pages(powers_of_two=True), Pages()]) == "any page size"
    assert needed([Pages(sizes=(64,)), Pages(sizes=(32, 64))]) == "page size 32 or 64"
    assert [size for size in (-1, 0, 1, 2, 3, 64) if Pages(powers_of_two=True).admit(size)] == [1, 2, 64]
    assert not Pages().admit(0)
    wide = Kernels(families=("MHA",), pages=Pages(), first=(8, 0))
    assert (wide.hardware, wide.run_on((7, 5)), wide.run_on((12, 0))) == ("sm_80 or newer", False, True)
