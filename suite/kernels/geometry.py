"""Byte arithmetic of the KV pools: rows, entries, pages, multipliers.

A *row* is one token's K (or V) of one layer; an MLA layer has one row, whose head is the value. An
*entry* is one token over all layers of a sub-pool. A page of the unified pool holds `page_size`
entries, in one of two layouts:

page-major (`unified`): layer after layer, `page_size` K rows of layer 0, then its V rows, and so on.
    The page is a uniform array of `blocks_per_page` blocks of `page_size` rows, so every layer's K
    and V is one dense view, one page table serves them all, and
    kernel id = (physical page * blocks_per_page) * page_size + offset.
token-major (`unified_token_major`): token after token, each with all its layers. Views are strided
    by the whole entry, rows may differ in width, and kernel id = physical id.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from suite.errors import InputError
from suite.kernels.ids import KVKind

if TYPE_CHECKING:
    from suite.kernels.pools.state import StateGeometry
    from suite.records import PoolMode  # training a model needs geometry, and no records

INT32_MAX = 2**31 - 1
ROW_ALIGN_BYTES = 16  # vector loads and stores of every vendor kernel
ENTRY_ALIGN_BYTES = 32  # a token-major entry, so that the rows of every token are aligned alike
BUFFER_ALIGN_BYTES = 4096
STATE = "state"  # names the sub-pool of recurrent state beside the KV kinds; its pages are slots, ids of their own
MIN_STATE_SLOTS = 3  # of one request: its state, the snapshot it came from, and the one it leaves
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """One attention layer as a backend sees it.

    `v_head_dim` is the width of values and outputs where it differs from keys. `is_latent` (MLA, absorbed):
    one KV head whose row is [latent | rotary key] and whose value is the row's first `v_head_dim` elements.
    `sinks`: [q_heads] fp32 logits that join the softmax denominator, or None.
    `window`: a token attends to the last `window` positions, itself included; None attends to all.
    `is_causal`: False lets the tokens of a verify batch's request see each other (a draft's block), later ones too.
    `k_scale`, `v_scale`: what fp8 rows are multiplied by when read, one number per tensor; 1.0 for other dtypes.
    """

    index: int
    q_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    sinks: torch.Tensor | None = None
    v_head_dim: int | None = None
    is_latent: bool = False
    is_causal: bool = True
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def kind(self) -> KVKind:
        return KVKind.FULL if self.window is None else KVKind.WINDOW

    @property
    def out_dim(self) -> int:
        """Elements of one head's output."""
        return self.v_head_dim or self.head_dim


@dataclass(frozen=True, kw_only=True)
class KVGeometry:
    """The rows of one sub-pool: which layers, how wide, how long a page.

    `is_latent` (MLA): one row per layer, `head_dim` = latent + rotary, value = its first `v_head_dim` elements.
    `scales`: (K, V) scale of each layer, of fp8 rows only; a stored row times its scale is the row. Empty: all 1.0.
    `is_causal`: as its layers'.
    """

    kind: KVKind
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_size: int
    v_head_dim: int | None = None
    window: int | None = None
    is_latent: bool = False
    is_causal: bool = True
    scales: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        for name in ("kv_heads", "head_dim", "page_size"):
            if (value := getattr(self, name)) < 1:
                raise InputError(name, value, "a positive number")
        if not self.layers:
            raise InputError("layers", self.layers, f"at least one layer in the {self.kind} pool")
        if (self.kind is KVKind.WINDOW) != (self.window is not None):
            raise InputError("window", self.window, f"a window for the window pool only, this is the {self.kind} pool")
        if self.window is not None and self.window < 1:
            raise InputError("window", self.window, "a positive number of tokens")
        for name in ("k_row_bytes", "v_row_bytes"):
            if (value := getattr(self, name)) % ROW_ALIGN_BYTES:
                raise InputError(name, value, f"a multiple of {ROW_ALIGN_BYTES}")
        if self.is_latent and (self.kv_heads != 1 or not 0 < self.value_dim < self.head_dim or self.window):
            got = (self.kv_heads, self.head_dim, self.value_dim, self.window)
            raise InputError("latent rows", got, "one head, a value shorter than its row, no window")
        self._check_scales()

    def _check_scales(self) -> None:
        if self.scales and self.dtype is not FP8:
            raise InputError("scales", self.scales, f"none for {self.dtype}: only fp8 rows are scaled")
        if self.scales and len(self.scales) != len(self.layers):
            raise InputError("scales", len(self.scales), f"{len(self.layers)}, one (K, V) pair per layer")
        for pair in self.scales:
            if not all(0 < scale < math.inf for scale in pair):
                raise InputError("scales", pair, "positive, finite numbers")
            if self.is_latent and pair[0] != pair[1]:
                raise InputError("scales", pair, "one number for both: a latent row holds its value")

    def scales_of(self, layer: int) -> tuple[float, float]:
        """(K, V): what stored rows of `layer` are multiplied by when read."""
        return self.scales[self.layers.index(layer)] if self.scales else (1.0, 1.0)

    @property
    def value_dim(self) -> int:
        """Elements of one head's value."""
        return self.v_head_dim or self.head_dim

    @property
    def k_row_bytes(self) -> int:
        return self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def v_row_bytes(self) -> int:
        """Bytes of a V row of its own; 0 for latent rows, whose value lies in the K row."""
        return 0 if self.is_latent else self.kv_heads * self.value_dim * self.dtype.itemsize

    @property
    def layer_bytes(self) -> int:
        """One token's rows of one layer."""
        return self.k_row_bytes + self.v_row_bytes

    def entry_bytes(self, mode: "PoolMode") -> int:
        """One token's rows of all layers, as a pool of `mode` lays them out."""
        exact = len(self.layers) * self.layer_bytes
        return -(-exact // ENTRY_ALIGN_BYTES) * ENTRY_ALIGN_BYTES if mode == "unified_token_major" else exact

    def page_bytes(self, mode: "PoolMode") -> int:
        return self.page_size * self.entry_bytes(mode)

    @property
    def blocks_per_page(self) -> int:
        """Row blocks in a page-major page, the page multiplier: K and V of each layer, or one row of an MLA layer."""
        return len(self.layers) * (1 if self.is_latent else 2)

    def k_block(self, layer: int) -> int:
        """Where in a page-major page, in blocks of `page_size` rows, layer `layer` keeps its K; V follows."""
        return self.layers.index(layer) * (1 if self.is_latent else 2)


@dataclass(frozen=True, kw_only=True)
class RunnerGeometry:
    """All sub-pools of one runner. Every model has a full pool; a sliding-window model has both.

    `state`: the recurrent state of a hybrid model, whose slots share the bytes of the pages.
    `draft`: a draft whose rows lie behind this runner's in the same pages, so that one page map serves both.
    """

    full: KVGeometry
    window: KVGeometry | None = None
    state: "StateGeometry | None" = None
    draft: "RunnerGeometry | None" = None

    def __post_init__(self) -> None:
        if self.draft is not None:
            self._check_draft(self.draft)
        if self.window is None:
            return
        for name in ("page_size", "dtype"):
            if getattr(self.full, name) != getattr(self.window, name):
                raise InputError(
                    f"window.{name}", getattr(self.window, name), f"{getattr(self.full, name)}, as the full pool"
                )
        if shared := set(self.full.layers) & set(self.window.layers):
            raise InputError("window.layers", sorted(shared), "layers that are not in the full pool")

    def _check_draft(self, draft: "RunnerGeometry") -> None:
        if draft.state is not None or draft.draft is not None:
            raise InputError("draft", "recurrent state or a draft of its own", "KV rows only behind a host's pages")
        for pool in draft.pools:
            host = self.full if pool.kind is KVKind.FULL else self.window
            if host is None:
                raise InputError(f"draft.{pool.kind}", pool.layers, f"no {pool.kind} layers: the host has no such pool")
            for name in ("page_size", "dtype"):
                if getattr(pool, name) != getattr(host, name):
                    expected = f"{getattr(host, name)}, as the host's rows"
                    raise InputError(f"draft.{pool.kind}.{name}", getattr(pool, name), expected)
            if pool.window is not None and host.window is not None and pool.window > host.window:
                raise InputError("draft.window", pool.window, f"at most {host.window}, what the host's window keeps")

    @property
    def pools(self) -> tuple[KVGeometry, ...]:
        return (self.full,) if self.window is None else (self.full, self.window)

    @property
    def page_size(self) -> int:
        return self.full.page_size

    def of(self, kind: KVKind) -> KVGeometry:
        pool = self.full if kind is KVKind.FULL else self.window
        if pool is None:
            raise KeyError(f"this runner has no {kind} pool")
        return pool

    def rows_of(self, kind: KVKind) -> tuple[KVGeometry, ...]:
        """What a page of `kind` holds: this runner's rows, then the draft's."""
        drafts = self.draft.pools if self.draft is not None else ()
        return (self.of(kind), *(pool for pool in drafts if pool.kind is kind))

    def page_bytes(self, kind: KVKind, mode: "PoolMode") -> int:
        """One page of `kind`, the draft's rows included."""
        rows = self.rows_of(kind)
        if mode == "unified_token_major":
            exact = sum(len(pool.layers) * pool.layer_bytes for pool in rows)
            return self.page_size * (-(-exact // ENTRY_ALIGN_BYTES) * ENTRY_ALIGN_BYTES)
        return sum(pool.page_bytes(mode) for pool in rows)

    def blocks_per_page(self, kind: KVKind) -> int:
        """The page multiplier of a page-major page, the same for this runner and for a draft behind it."""
        return sum(pool.blocks_per_page for pool in self.rows_of(kind))

    def unit_bytes(self, mode: "PoolMode") -> dict[str, int]:
        """Bytes of a page or slot of each sub-pool, in the order they lie in the buffer: state, window, full."""
        sizes: dict[str, int] = {} if self.state is None else {STATE: self.state.slot_bytes}
        for pool in reversed(self.pools):
            sizes[pool.kind] = self.page_bytes(pool.kind, mode)
        return sizes

    def kind_of(self, layer: int) -> KVKind:
        for pool in self.pools:
            if layer in pool.layers:
                return pool.kind
        raise KeyError(
            f"layer {layer} is in no pool; full {self.full.layers}, window {self.window and self.window.layers}"
        )

    @classmethod
    def from_layers(
        cls,
        layers: list[AttentionLayer],
        dtype: torch.dtype,
        page_size: int,
        *,
        state: "StateGeometry | None" = None,
        draft: "RunnerGeometry | None" = None,
    ) -> "RunnerGeometry":
        """The pools that `layers` need. Layers of one kind must agree in heads, width and window.

        The layers' scales hold for fp8 rows; rows of another `dtype` are stored as they are.
        """

        def pool(kind: KVKind) -> KVGeometry | None:
            mine = [layer for layer in layers if layer.kind is kind]
            if not mine:
                return None
            names = ("kv_heads", "head_dim", "v_head_dim", "window", "is_latent", "is_causal")
            shapes = {tuple(getattr(each, name) for name in names) for each in mine}
            if len(shapes) > 1:
                expected = f"one ({', '.join(names)}) for all"
                raise InputError(f"{kind} layers", sorted(shapes, key=str), expected)
            kv_heads, head_dim, v_head_dim, window, is_latent, is_causal = shapes.pop()
            return KVGeometry(
                kind=kind,
                layers=tuple(layer.index for layer in mine),
                kv_heads=kv_heads,
                head_dim=head_dim,
                dtype=dtype,
                page_size=page_size,
                v_head_dim=v_head_dim,
                window=window,
                is_latent=is_latent,
                is_causal=is_causal,
                scales=tuple((layer.k_scale, layer.v_scale) for layer in mine) if dtype is FP8 else (),
            )

        full = pool(KVKind.FULL)
        if full is None:
            raise InputError("layers", [layer.index for layer in layers], "at least one full-attention layer")
        return cls(full=full, window=pool(KVKind.WINDOW), state=state, draft=draft)


def pages_for(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def bytes_for_pages(geometry: RunnerGeometry, mode: "PoolMode", pages: int, slots: int = 0) -> int:
    """Bytes of a buffer that holds its sink, `pages` pages in every KV sub-pool at once, and `slots` state slots."""
    sizes = geometry.unit_bytes(mode)
    need = max(sizes.values())
    for kind, size in sizes.items():
        need += ((slots if kind == STATE else pages) + 1) * size  # one more: frontiers of two sizes need not meet
    return -(-need // BUFFER_ALIGN_BYTES) * BUFFER_ALIGN_BYTES
