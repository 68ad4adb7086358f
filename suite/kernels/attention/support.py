"""The one table of who may serve what.

`SUPPORT` holds the facts, one line per backend; `GUARDS` the launches that are refused because of
them. The allow-lists of the unified pools, `kvproof doctor` and docs/backends.md derive from these
two. Names register with late-importing factories, so that listing them loads no GPU library and no
torch.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from suite.errors import UnknownNameError
from suite.kernels.attention.facts import (
    FAMILIES,
    Capability,
    Family,
    Kernels,
    Launch,
    Pages,
    Support,
    either,
    needed,
)
from suite.records import Launcher, PoolMode

if TYPE_CHECKING:
    from suite.kernels.attention.base import AttentionBackend
    from suite.kernels.geometry import RunnerGeometry

BACKENDS: dict[str, str] = {
    "reference": "suite.kernels.attention.reference:ReferenceBackend",
    "triton": "suite.kernels.attention.triton:TritonBackend",
    "fa3": "suite.kernels.attention.fa3:Fa3Backend",
    "fa4": "suite.kernels.attention.fa4:Fa4Backend",
    "flashinfer": "suite.kernels.attention.flashinfer:FlashInferBackend",
    "flashinfer_mla": "suite.kernels.attention.flashinfer_mla:FlashInferMlaBackend",
    "trtllm_mha": "suite.kernels.attention.trtllm_mha:TrtllmMhaBackend",
    "trtllm_mla": "suite.kernels.attention.trtllm_mla:TrtllmMlaBackend",
    "cutedsl_mla": "suite.kernels.attention.cutedsl_mla:CuteDslMlaBackend",
    "tokenspeed_mla": "suite.kernels.attention.tokenspeed_mla:TokenSpeedMlaBackend",
    "flashmla": "suite.kernels.attention.flashmla:FlashMlaBackend",
}


def backend_class(name: str) -> "type[AttentionBackend]":
    """The class registered as `name`; UnknownNameError otherwise."""
    if name not in BACKENDS:
        raise UnknownNameError("backend", name, BACKENDS)
    module, _, cls = BACKENDS[name].partition(":")
    found: type[AttentionBackend] = getattr(importlib.import_module(module), cls)
    return found


def kernel_library(name: str, launcher: Launcher) -> str:
    """The distribution whose kernels execute backend `name` under `launcher`."""
    if launcher == "reference":
        return "torch"
    package = SUPPORT[name].package
    return package[1] if package and launcher == "native" else "triton"


# -- the facts -------------------------------------------------------------------------------------

ANY_PAGES, POWERS_OF_TWO = Pages(), Pages(powers_of_two=True)
_WINDOWED: tuple[Family, ...] = ("MHA", "SWA")
_XQA = Pages(sizes=(16, 32, 64))
_SM90, _SM100, _SM120 = (9, 0), (10, 0), (12, 0)
_SGL_KERNEL, _FLASHINFER = ("sgl_kernel", "sglang-kernel"), ("flashinfer", "flashinfer-python")
_AS_TRTLLM_MLA = "block table int32, as trtllm_mla"
_TRTLLM_MLA = Support(
    name="trtllm_mla",
    layout="block table int32, own -1 tail, padded width",
    kernels=(Kernels(families=("MLA",), pages=Pages(sizes=(32, 64)), first=_SM100),),
    package=_FLASHINFER,
    verify="rows up to 16 tokens on sm_10x, else lanes",
)

BLOCK_ATTENTION = ("reference", "triton")  # let a block's tokens see each other
SUPPORT: dict[str, Support] = {
    line.name: line
    for line in (
        Support(
            name="reference",
            layout="any",
            kernels=(Kernels(families=FAMILIES, pages=ANY_PAGES),),
            sinks=True,
            unequal_rows=True,
            oracle=True,
        ),
        Support(
            name="triton",
            layout="CSR int32",
            kernels=(Kernels(families=FAMILIES, pages=ANY_PAGES),),
            sinks=True,
            unequal_rows=True,
        ),
        Support(
            name="fa3",
            layout="page table int32, tail may be stale",
            kernels=(
                Kernels(families=_WINDOWED, pages=POWERS_OF_TWO, first=(8, 0), last=_SM90),
                Kernels(families=("MLA",), pages=POWERS_OF_TWO, first=_SM90, last=_SM90),
            ),
            package=_SGL_KERNEL,
            sinks=True,
            unequal_rows=True,
        ),
        Support(
            name="fa4",
            layout="page table int32",
            kernels=(
                Kernels(families=_WINDOWED, pages=POWERS_OF_TWO, first=_SM90, last=_SM90),
                Kernels(families=_WINDOWED, pages=Pages(sizes=(128,)), first=_SM100, last=(10, 3)),
            ),
            package=("flash_attn.cute", "flash-attn-4"),
            sinks=True,
            unequal_rows=True,
        ),
        Support(
            name="flashinfer",
            layout="CSR int32, one wrapper per window",
            kernels=(Kernels(families=_WINDOWED, pages=ANY_PAGES),),
            package=_FLASHINFER,
            sinks=True,
        ),
        Support(
            name="flashinfer_mla",
            layout="CSR int32",
            kernels=(Kernels(families=("MLA",), pages=ANY_PAGES),),
            package=_FLASHINFER,
            typed="flashinfer",
        ),
        Support(
            name="trtllm_mha",
            layout="page table int32, packed rows",
            kernels=(
                Kernels(families=_WINDOWED, pages=_XQA, first=_SM90, last=_SM90),
                Kernels(families=_WINDOWED, pages=Pages(sizes=(16, 32, 64, 128)), first=_SM100, last=(10, 3)),
                Kernels(families=_WINDOWED, pages=_XQA, first=_SM120, last=(12, 1)),
            ),
            package=_FLASHINFER,
            sinks=True,
            verify="lanes on XQA (sm_90, sm_12x), rows on sm_10x",
        ),
        _TRTLLM_MLA,
        replace(_TRTLLM_MLA, name="cutedsl_mla", layout=_AS_TRTLLM_MLA),
        replace(
            _TRTLLM_MLA, name="tokenspeed_mla", layout=_AS_TRTLLM_MLA, package=("tokenspeed_mla", "tokenspeed-mla")
        ),
        Support(
            name="flashmla",
            layout="block table int32",
            kernels=(Kernels(families=("MLA",), pages=Pages(sizes=(64,)), first=_SM90),),
            package=_SGL_KERNEL,
            snaps_to=64,
            verify="rows up to 16 tokens, else lanes",
        ),
    )
}


# -- the guards ------------------------------------------------------------------------------------


Check = Callable[[Support, Launch], str | None]


def _family(line: Support, launch: Launch) -> str | None:
    missing = [family for family in launch.families if family not in line.families]
    return f"needs {either(line.families)}, got {missing[0]}" if missing else None


def _pool_mode(line: Support, launch: Launch) -> str | None:
    return None if launch.pool in line.pool_modes else f"needs pool {either(line.pool_modes)}, got {launch.pool}"


def _sinks(line: Support, launch: Launch) -> str | None:
    return "needs a model without sinks, got one with them" if launch.sinks and not line.sinks else None


def _unequal_rows(line: Support, launch: Launch) -> str | None:
    if launch.unequal_rows is None or (line.unequal_rows and launch.pool != "unified"):
        return None
    where = " on the unified pool" if launch.pool == "unified" else ""
    return f"needs equal K and V rows{where}, got {launch.unequal_rows[0]} and {launch.unequal_rows[1]} bytes"


def _page_size(line: Support, launch: Launch) -> str | None:
    for family in launch.families:
        pages = line.pages(family)
        if not any(each.admit(launch.page_size) for each in pages):
            return f"needs {needed(pages)}, got {launch.page_size}"
    return None


def _page_major(line: Support, launch: Launch) -> str | None:
    return "needs pool unified for page-major pages, got static" if launch.page_major and _static(launch) else None


def _local_attention(line: Support, launch: Launch) -> str | None:
    if not launch.local_attention or _static(launch):
        return None
    return f"needs full or sliding-window attention on pool {launch.pool}, got local (chunked) attention"


def _prefill_aware_window(line: Support, launch: Launch) -> str | None:
    if not launch.prefill_aware_window or _static(launch) or line.name not in ("fa3", "fa4"):
        return None
    return f"needs a sliding window of one width on pool {launch.pool}, got a prefill-aware one"


def _block_attention(line: Support, launch: Launch) -> str | None:
    if not launch.block_attention or line.name in BLOCK_ATTENTION:
        return None
    return "needs causal attention, got a draft's block, whose tokens all see each other"


def _static(launch: Launch) -> bool:
    return launch.pool == "static"


GUARDS: dict[str, Check] = {
    "a family that the backend has no kernels for": _family,
    "a pool mode that the backend does not read": _pool_mode,
    "a sink model on a backend that drops sinks": _sinks,
    "unequal K and V rows on the unified pool, whose page is a uniform array of rows; elsewhere, on a backend "
    "that takes equal ones only": _unequal_rows,
    "a page size that the backend's kernels do not take": _page_size,
    "page-major pages without the unified pool": _page_major,
    "local (chunked) attention on a unified pool: it would translate a kernel id again": _local_attention,
    "a prefill-aware sliding window on a unified pool with fa3 or fa4: it indexes by pool slot": _prefill_aware_window,
    "a block draft, whose tokens see later ones, on a backend that attends causally only": _block_attention,
}


def launch_refusal(name: str, launch: Launch) -> str | None:
    """The first guard that refuses `launch` on backend `name`, as `name: needs X, got Y`; None when none does."""
    if name not in SUPPORT:
        raise UnknownNameError("backend", name, SUPPORT)
    line = SUPPORT[name]
    return next((f"{name}: {reason}" for check in GUARDS.values() if (reason := check(line, launch))), None)


def table_refusal(
    name: str, geometry: "RunnerGeometry", pool: PoolMode, device: str, launcher: Launcher, sinks: bool
) -> str | None:
    """What every backend's `refusal` asks first: all guards, then what the kernels for this very GPU add.

    A GPU that none of its kernels know is `native_refusal`'s to name.
    """
    launch = Launch.of(geometry, pool, sinks)
    if reason := launch_refusal(name, launch):
        return reason
    capability = gpu_capability() if launcher == "native" and device == "cuda" else None
    here = [each for each in SUPPORT[name].kernels if capability is not None and each.run_on(capability)]
    if capability is None or not here:
        return None
    gpu = f"sm_{capability[0]}{capability[1]}"
    for family in launch.families:
        pages = [each.pages for each in here if family in each.families]
        if not pages:
            return f"{name}: needs {SUPPORT[name].hardware_for(family)} for {family}, got {gpu}"
        if not any(each.admit(launch.page_size) for each in pages):
            return f"{name}: needs {needed(pages)} on {gpu}, got {launch.page_size}"
    return None


def native_refusal(name: str, device: str) -> str | None:
    """Why the vendor kernels of `name` cannot run on `device` here: no such GPU, or their package is not installed."""
    line, capability = SUPPORT[name], gpu_capability() if device == "cuda" else None
    if capability is None:
        return f"{name}: needs {line.hardware}, got {'no GPU' if device == 'cuda' else device}"
    if not any(each.run_on(capability) for each in line.kernels):
        return f"{name}: needs {line.hardware}, got sm_{capability[0]}{capability[1]}"
    if line.package is not None and not _installed(line.package[0]):
        return f"{name}: needs the package {line.package[1]}, got none installed"
    return None


def gpu_capability() -> Capability | None:
    """The compute capability of the current GPU, or None without one. Imports torch."""
    import torch

    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def _installed(module: str) -> bool:
    """Whether there is a `module`; it is not imported, the parents of a dotted one are."""
    parent = module.rpartition(".")[0]
    return (not parent or _installed(parent)) and importlib.util.find_spec(module) is not None


def unified_allow_list(family: Family, *, unequal_rows: bool = False) -> frozenset[str]:
    """The backends, by the names that users type, that may read a unified pool. The oracle is not among them."""
    lines = (line for line in SUPPORT.values() if family in line.families and not line.oracle)
    wanted = (line for line in lines if line.unequal_rows or not unequal_rows)
    return frozenset(line.typed or line.name for line in wanted if set(line.pool_modes) - {"static"})
