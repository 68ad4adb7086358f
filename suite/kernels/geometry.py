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

from suite.errors import InputError, PageMapRangeError, PoolTooSmallError, UnequalRowsError
from suite.kernels.ids import KVKind

if TYPE_CHECKING:
    from suite.records import PoolMode  # training a model needs geometry, and no records

INT32_MAX = 2**31 - 1
ROW_ALIGN_BYTES = 16  # vector loads and stores of every vendor kernel
ENTRY_ALIGN_BYTES = 32  # a token-major entry, so that the rows of every token are aligned alike
BUFFER_ALIGN_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """One attention layer as a backend sees it.

    `v_head_dim` is the width of values and outputs where it differs from keys. `is_latent` (MLA, absorbed):
    one KV head whose row is [latent | rotary key] and whose value is the row's first `v_head_dim` elements.
    `sinks`: [q_heads] fp32 logits that join the softmax denominator, or None.
    `window`: a token attends to the last `window` positions, itself included; None attends to all.
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
    """All sub-pools of one runner. Every model has a full pool; a sliding-window model has both."""

    full: KVGeometry
    window: KVGeometry | None = None

    def __post_init__(self) -> None:
        if self.window is None:
            return
        for name in ("page_size", "dtype"):
            if getattr(self.full, name) != getattr(self.window, name):
                raise InputError(
                    f"window.{name}", getattr(self.window, name), f"{getattr(self.full, name)}, as the full pool"
                )
        if shared := set(self.full.layers) & set(self.window.layers):
            raise InputError("window.layers", sorted(shared), "layers that are not in the full pool")

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

    def kind_of(self, layer: int) -> KVKind:
        for pool in self.pools:
            if layer in pool.layers:
                return pool.kind
        raise KeyError(
            f"layer {layer} is in no pool; full {self.full.layers}, window {self.window and self.window.layers}"
        )

    @classmethod
    def from_layers(cls, layers: list[AttentionLayer], dtype: torch.dtype, page_size: int) -> "RunnerGeometry":
        """The pools that `layers` need. Layers of one kind must agree in heads, width and window."""

        def pool(kind: KVKind) -> KVGeometry | None:
            mine = [layer for layer in layers if layer.kind is kind]
            if not mine:
                return None
            shapes = {(each.kv_heads, each.head_dim, each.v_head_dim, each.window, each.is_latent) for each in mine}
            if len(shapes) > 1:
                expected = "one (kv_heads, head_dim, v_head_dim, window, is_latent) for all"
                raise InputError(f"{kind} layers", sorted(shapes, key=str), expected)
            kv_heads, head_dim, v_head_dim, window, is_latent = shapes.pop()
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
            )

        full = pool(KVKind.FULL)
        if full is None:
            raise InputError("layers", [layer.index for layer in layers], "at least one full-attention layer")
        return cls(full=full, window=pool(KVKind.WINDOW))


@dataclass(frozen=True, kw_only=True)
class SpanPlan:
    """One sub-pool's share of the unified buffer: pages [min_page, num_pages) may be bound, page 0 is the sink."""

    geometry: KVGeometry
    page_bytes: int
    num_pages: int
    min_page: int


def plan_buffer(
    geometry: RunnerGeometry, mode: "PoolMode", buffer_bytes: int, max_request_tokens: int
) -> tuple[int, dict[KVKind, SpanPlan]]:
    """Size every sub-pool against one shared buffer of layout `mode`.

    Every sub-pool is anchored at byte 0 and may reach the end; only the allocator keeps them
    disjoint. The first `max(page_bytes)` bytes are the sink of all of them.

    Returns the buffer's bytes, floored to 4,096, and the plan per kind. Raises UnequalRowsError (page-major),
    PageMapRangeError, and PoolTooSmallError when one request of `max_request_tokens` does not fit.
    """
    total = buffer_bytes // BUFFER_ALIGN_BYTES * BUFFER_ALIGN_BYTES
    sink_bytes = max(pool.page_bytes(mode) for pool in geometry.pools)
    plans: dict[KVKind, SpanPlan] = {}
    for pool in geometry.pools:
        if mode == "unified" and not pool.is_latent and pool.k_row_bytes != pool.v_row_bytes:
            expected = f"{pool.k_row_bytes}, the K row: a page is a uniform array of rows"
            raise UnequalRowsError(f"{pool.kind}.v_row_bytes", pool.v_row_bytes, expected)
        page_bytes = pool.page_bytes(mode)
        num_pages = total // page_bytes
        rows = num_pages * pool.page_size * (pool.blocks_per_page if mode == "unified" else 1)
        if rows > INT32_MAX:
            raise PageMapRangeError(f"{pool.kind}.kernel_ids", rows, f"at most {INT32_MAX}: page tables hold int32")
        min_page = math.ceil(sink_bytes / page_bytes)
        plans[pool.kind] = SpanPlan(geometry=pool, page_bytes=page_bytes, num_pages=num_pages, min_page=min_page)
    need = bytes_for_pages(geometry, mode, pages_for(max_request_tokens, geometry.page_size))
    if total < need:
        expected = f"at least {need} for the sink and one request of {max_request_tokens} tokens"
        raise PoolTooSmallError("buffer_bytes", total, expected)
    return total, plans


def pages_for(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def bytes_for_pages(geometry: RunnerGeometry, mode: "PoolMode", pages: int) -> int:
    """Bytes of a buffer that holds its sink and `pages` pages, each bound in every sub-pool."""
    sizes = [pool.page_bytes(mode) for pool in geometry.pools]
    need = max(sizes) + (pages + 1) * sum(sizes)  # one more: frontiers of two page sizes need not meet
    return -(-need // BUFFER_ALIGN_BYTES) * BUFFER_ALIGN_BYTES
