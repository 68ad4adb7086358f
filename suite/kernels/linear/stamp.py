"""Which kernels a runner's linear attention uses: one frozen record per runner, resolved by a pure function.

A table shared by the process would let a second runner (a draft, a rebuild) change what the first one runs,
and a default written into the configuration would look like an operator's wish to the second. So the record
hangs on the runner, backends read it there without a default (an unstamped runner raises AttributeError), and
the automatic default of the prefill kernel is an argument that is stored nowhere.
"""

from dataclasses import dataclass
from typing import Any

from suite.errors import InvariantError, UnknownNameError

# every kernel name that a flag may carry; which family serves which is the backends' business
KERNELS: tuple[str, ...] = (
    "triton",
    "cutedsl",
    "nv_cutedsl",
    "flashinfer",
    "flashkda",
    "nvidia_kda",
    "ptx_kda",
    "helion",
    "intel_xpu",
)
BASE = "triton"


@dataclass(frozen=True, kw_only=True)
class LinearAttnFlags:
    """What the operator asked for. None means "not asked"; nothing but the operator ever sets a field."""

    base: str = BASE
    decode: str | None = None
    prefill: str | None = None
    verify: str | None = None


@dataclass(frozen=True, kw_only=True)
class LinearAttnBackends:
    """The stamp: the kernel of each phase of one runner."""

    decode: str
    prefill: str
    verify: str


def resolve(flags: LinearAttnFlags, *, prefill_default: str | None = None) -> LinearAttnBackends:
    """The stamp that `flags` and the caller's automatic default for prefill amount to.

    decode: its flag, else base. prefill: its flag, else `prefill_default`, else base. verify: its flag, else
    flashinfer where decode is flashinfer, else triton. Raises UnknownNameError for a name not in KERNELS.
    """
    named = {
        "linear_attn_base": flags.base,
        "linear_attn_decode": flags.decode,
        "linear_attn_prefill": flags.prefill,
        "linear_attn_verify": flags.verify,
        "linear_attn_prefill_default": prefill_default,
    }
    for field, name in named.items():
        if name is not None and name not in KERNELS:
            raise UnknownNameError(field, name, KERNELS)
    decode = flags.decode or flags.base
    return LinearAttnBackends(
        decode=decode,
        prefill=flags.prefill or prefill_default or flags.base,
        verify=flags.verify or ("flashinfer" if decode == "flashinfer" else "triton"),
    )


@dataclass(frozen=True, kw_only=True)
class PrefillFacts:
    """What the automatic default for GDN prefill hangs on; gathered by the caller, who alone knows its runner.

    capability: (major, minor) of the GPU, None on a CPU. chunk_tokens: the engine's prefill chunk.
    """

    head_dims: tuple[int, int]
    capability: tuple[int, int] | None
    cuda_major: int
    chunk_tokens: int
    dynamic_chunks: bool
    deterministic: bool
    state_dtype: str
    importable: bool


def gdn_prefill_default(flags: LinearAttnFlags, facts: PrefillFacts) -> str | None:
    """`flashinfer` where its GDN prefill kernel fits and nobody asked for another one, else None."""
    asked = flags.prefill is not None or flags.base != BASE
    if asked or facts.deterministic or facts.dynamic_chunks or not facts.importable or facts.head_dims != (128, 128):
        return None
    if facts.capability == (9, 0):
        fits = facts.chunk_tokens <= 32768 and facts.state_dtype == "float32"
    elif facts.capability is not None and facts.capability[0] == 10:
        fits = facts.cuda_major >= 13 and facts.chunk_tokens <= 8192 and facts.state_dtype == "bfloat16"
    else:
        fits = False
    return "flashinfer" if fits else None


def stamp_runner(runner: Any, stamp: LinearAttnBackends) -> None:
    """Set the stamp, before any backend of the runner is built. InvariantError when another one is set already."""
    known = getattr(runner, "linear_attn_backends", stamp)
    if known != stamp:
        raise InvariantError(f"stamp_runner: runner is stamped {known} already, got {stamp}")
    runner.linear_attn_backends = stamp


def stamp_of(runner: Any) -> LinearAttnBackends:
    """The runner's stamp; AttributeError when nobody stamped it, TypeError when it is something else."""
    stamp = runner.linear_attn_backends
    if not isinstance(stamp, LinearAttnBackends):
        raise TypeError(f"linear_attn_backends: needs LinearAttnBackends, got {type(stamp).__name__}")
    return stamp
