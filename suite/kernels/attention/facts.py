"""What can be said of an attention backend: families, page sizes, GPUs, layouts. `support.py` says it.

Imports no torch: listing what exists loads nothing heavy.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from suite.records import POOL_MODES, PoolMode

if TYPE_CHECKING:
    from suite.kernels.geometry import RunnerGeometry

Family = Literal["MHA", "SWA", "MLA"]
Capability = tuple[int, int]  # of a GPU: (9, 0) is sm_90
FAMILIES: tuple[Family, ...] = ("MHA", "SWA", "MLA")


@dataclass(frozen=True, kw_only=True)
class Pages:
    """Page sizes in tokens that a kernel takes: those listed, else every power of two, else every one."""

    sizes: tuple[int, ...] = ()
    powers_of_two: bool = False

    def admit(self, page_size: int) -> bool:
        if self.sizes:
            return page_size in self.sizes
        return page_size > 0 and (not self.powers_of_two or page_size & (page_size - 1) == 0)

    @property
    def need(self) -> str:
        """The end of the sentence "needs ..."."""
        if self.sizes:
            return f"page size {either(self.sizes)}"
        return "a page size that is a power of two" if self.powers_of_two else "any page size"


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """One build of a backend's kernels: the GPUs it runs on, ends included (None: no end), families and page sizes."""

    families: tuple[Family, ...]
    pages: Pages
    first: Capability | None = None
    last: Capability | None = None

    def run_on(self, capability: Capability) -> bool:
        return (self.first is None or self.first <= capability) and (self.last is None or capability <= self.last)

    def covers(self, other: "Kernels") -> bool:
        """Whether this range of GPUs holds all of `other`'s and more."""
        low, high = self._ends
        other_low, other_high = other._ends
        return low <= other_low and other_high <= high and (low, high) != (other_low, other_high)

    @property
    def _ends(self) -> tuple[Capability, Capability]:
        return self.first or (0, 0), self.last or (99, 9)

    @property
    def hardware(self) -> str:
        if self.first is None:
            return "any CUDA GPU"
        first = f"sm_{self.first[0]}{self.first[1]}"
        if self.last is None:
            return f"{first} or newer"
        return first if self.first == self.last else f"{first} to sm_{self.last[0]}{self.last[1]}"


@dataclass(frozen=True, kw_only=True)
class Support:
    """What one backend may serve.

    `package`: (module, distribution) whose kernels it launches; None for our own. `typed`: the name by which
    users ask for it where that differs. `sinks`: whether it lets sinks join the softmax. `unequal_rows`: whether
    it takes values narrower than keys, on pools whose layout can hold them. `oracle`: it is what others are
    held to, so no allow-list names it. `snaps_to`: the page size it serves whatever was asked for. `verify`: how its
    kernels take several new tokens per request, as rows of one call or as a lane, a request of its own, for each.
    """

    name: str
    layout: str
    kernels: tuple[Kernels, ...]
    package: tuple[str, str] | None = None
    typed: str | None = None
    sinks: bool = False
    unequal_rows: bool = False
    oracle: bool = False
    snaps_to: int | None = None
    pool_modes: tuple[PoolMode, ...] = POOL_MODES
    verify: str = "rows"

    @property
    def families(self) -> tuple[Family, ...]:
        return tuple(family for family in FAMILIES if any(family in each.families for each in self.kernels))

    @property
    def hardware(self) -> str:
        """The GPUs that any of its kernels run on, a range inside another left out."""
        wide = [each for each in self.kernels if not any(other.covers(each) for other in self.kernels)]
        return "any device" if self.oracle else either(dict.fromkeys(each.hardware for each in wide))

    def hardware_for(self, family: Family) -> str:
        return either(dict.fromkeys(each.hardware for each in self.kernels if family in each.families))

    def pages(self, family: Family) -> list[Pages]:
        return [each.pages for each in self.kernels if family in each.families]


def either(values: Iterable[object]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last


def needed(pages: Iterable[Pages]) -> str:
    """What a page size needs so that one of `pages` admits it, as the end of the sentence "needs ..."."""
    every = list(pages)
    open_ended = [each for each in every if not each.sizes]
    if open_ended:
        return min(open_ended, key=lambda each: each.powers_of_two).need
    return Pages(sizes=tuple(sorted({size for each in every for size in each.sizes}))).need


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a launch asks of a backend, as far as no device need be asked. Row widths in bytes."""

    families: tuple[Family, ...]
    page_size: int
    pool: PoolMode
    sinks: bool = False
    unequal_rows: tuple[int, int] | None = None  # K and V bytes of the first sub-pool whose rows differ
    page_major: bool = False  # asked for by a flag of its own, as serving engines have one
    local_attention: bool = False
    prefill_aware_window: bool = False
    block_attention: bool = False  # a draft whose block's tokens all see each other

    @classmethod
    def of(cls, geometry: "RunnerGeometry", pool: PoolMode, sinks: bool) -> "Launch":
        """The launch of a runner whose sub-pools are `geometry`, on a pool of mode `pool`."""
        found = {"MLA" if kv.is_latent else "SWA" if kv.window else "MHA" for kv in geometry.pools}
        rows = [(kv.k_row_bytes, kv.v_row_bytes) for kv in geometry.pools if not kv.is_latent]
        return cls(
            families=tuple(family for family in FAMILIES if family in found),
            page_size=geometry.page_size,
            pool=pool,
            sinks=sinks,
            block_attention=any(not kv.is_causal for kv in geometry.pools),
            unequal_rows=next((pair for pair in rows if pair[0] != pair[1]), None),
        )
