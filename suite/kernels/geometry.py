"""Byte arithmetic of the KV pools: rows, entries, pages, multipliers.

A *row* is one token's K (or V) of one layer, `kv_heads * head_dim` elements. An
*entry* is one token over all layers of a sub-pool, K and V. A *page envelope* of
the unified pool holds `page_size` entries, layer-major: `page_size` K rows of
layer 0, then its V rows, then layer 1, and so on. So the envelope is a uniform
array of `2 * layers` blocks of `page_size` rows, each layer's K and V are dense
views, and one page table serves all layers:

    kernel id = (physical page * page_multiplier) * page_size + offset
"""

import math
from dataclasses import dataclass

import torch

from suite.errors import InputError, PageMapRangeError, PoolTooSmallError, UnequalRowsError
from suite.kernels.ids import KVKind

INT32_MAX = 2**31 - 1
ROW_ALIGN_BYTES = 16  # vector loads and stores of every vendor kernel
BUFFER_ALIGN_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """One attention layer as a backend sees it.

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

    @property
    def kind(self) -> KVKind:
        return KVKind.FULL if self.window is None else KVKind.WINDOW


@dataclass(frozen=True, kw_only=True)
class KVGeometry:
    """The rows of one sub-pool: which layers, how wide, how long a page."""

    kind: KVKind
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_size: int
    v_head_dim: int | None = None
    window: int | None = None

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
        if self.k_row_bytes % ROW_ALIGN_BYTES:
            raise InputError("k_row_bytes", self.k_row_bytes, f"a multiple of {ROW_ALIGN_BYTES}")

    @property
    def k_row_bytes(self) -> int:
        return self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def v_row_bytes(self) -> int:
        return self.kv_heads * (self.v_head_dim or self.head_dim) * self.dtype.itemsize

    @property
    def entry_bytes(self) -> int:
        return len(self.layers) * (self.k_row_bytes + self.v_row_bytes)

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.entry_bytes

    @property
    def blocks_per_page(self) -> int:
        """Row blocks in one envelope: K and V of each layer. The unified pool's page multiplier."""
        return 2 * len(self.layers)

    def k_block(self, layer: int) -> int:
        """Where in the envelope, in blocks of `page_size` rows, layer `layer` keeps its K; V follows."""
        return 2 * self.layers.index(layer)


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
            shapes = {(layer.kv_heads, layer.head_dim, layer.window) for layer in mine}
            if len(shapes) > 1:
                raise InputError(f"{kind} layers", sorted(shapes, key=str), "one (kv_heads, head_dim, window) for all")
            kv_heads, head_dim, window = shapes.pop()
            return KVGeometry(
                kind=kind,
                layers=tuple(layer.index for layer in mine),
                kv_heads=kv_heads,
                head_dim=head_dim,
                dtype=dtype,
                page_size=page_size,
                window=window,
            )

        full = pool(KVKind.FULL)
        if full is None:
            raise InputError("layers", [layer.index for layer in layers], "at least one full-attention layer")
        return cls(full=full, window=pool(KVKind.WINDOW))


@dataclass(frozen=True, kw_only=True)
class SpanPlan:
    """One sub-pool's share of the unified buffer: pages [min_page, num_pages) may be bound, page 0 is the sink."""

    geometry: KVGeometry
    num_pages: int
    min_page: int


def plan_buffer(
    geometry: RunnerGeometry, buffer_bytes: int, max_request_tokens: int
) -> tuple[int, dict[KVKind, SpanPlan]]:
    """Size every sub-pool against one shared buffer.

    Every sub-pool is anchored at byte 0 and may reach the end; only the allocator keeps them
    disjoint. The first `max(page_bytes)` bytes are the sink of all of them.

    Returns the buffer's bytes, floored to 4,096, and the plan per kind. Raises UnequalRowsError,
    PageMapRangeError, and PoolTooSmallError when one request of `max_request_tokens` does not fit.
    """
    total = buffer_bytes // BUFFER_ALIGN_BYTES * BUFFER_ALIGN_BYTES
    sink_bytes = max(pool.page_bytes for pool in geometry.pools)
    plans: dict[KVKind, SpanPlan] = {}
    for pool in geometry.pools:
        if pool.k_row_bytes != pool.v_row_bytes:
            raise UnequalRowsError(
                f"{pool.kind}.v_row_bytes",
                pool.v_row_bytes,
                f"{pool.k_row_bytes}, the K row: pages are uniform arrays of rows",
            )
        num_pages = total // pool.page_bytes
        rows = num_pages * pool.blocks_per_page * pool.page_size
        if rows > INT32_MAX:
            raise PageMapRangeError(f"{pool.kind}.kernel_ids", rows, f"at most {INT32_MAX}: page tables hold int32")
        plans[pool.kind] = SpanPlan(
            geometry=pool, num_pages=num_pages, min_page=math.ceil(sink_bytes / pool.page_bytes)
        )
    need = sink_bytes + request_bytes(geometry, max_request_tokens)
    # one page of slack per sub-pool: page boundaries of the two sizes need not meet
    need += sum(pool.page_bytes for pool in geometry.pools)
    if total < need:
        raise PoolTooSmallError(
            "buffer_bytes", total, f"at least {need} for the sink and one request of {max_request_tokens} tokens"
        )
    return total, plans


def pages_for(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def request_bytes(geometry: RunnerGeometry, tokens: int) -> int:
    """Bytes that one request of `tokens` tokens binds at most at the same time, whole pages counted."""
    need = pages_for(tokens, geometry.page_size) * geometry.full.page_bytes
    if geometry.window is not None:
        window_tokens = min(tokens, (geometry.window.window or 0) + geometry.page_size)
        need += pages_for(window_tokens, geometry.page_size) * geometry.window.page_bytes
    return need
