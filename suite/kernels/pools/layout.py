"""How the sub-pools of one runner share a buffer: where each may lie, and whether it is large enough at all."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from suite.errors import InputError, PageMapRangeError, PoolTooSmallError, UnequalRowsError
from suite.kernels.geometry import (
    BUFFER_ALIGN_BYTES,
    INT32_MAX,
    MIN_STATE_SLOTS,
    RunnerGeometry,
    bytes_for_pages,
    pages_for,
)
from suite.kernels.ids import KVKind

if TYPE_CHECKING:
    from suite.records import PoolMode


ENVELOPE_ALIGN_BYTES = 8  # pages and slots are moved in words of that size


@dataclass(frozen=True, kw_only=True)
class SpanPlan:
    """One sub-pool's share of the buffer: pages [min_page, num_pages) may be bound, page 0 is the sink.

    `kind` is a KVKind, or STATE, whose pages are slots.
    """

    kind: str
    page_bytes: int
    num_pages: int
    min_page: int


def plan_buffer(
    geometry: RunnerGeometry, mode: "PoolMode", buffer_bytes: int, max_request_tokens: int
) -> tuple[int, dict[str, SpanPlan]]:
    """Size every sub-pool against one shared buffer of layout `mode`.

    Every sub-pool is anchored at byte 0 and may reach the end; only the allocator keeps them
    disjoint. The first `max(page_bytes)` bytes are the sink of all of them.

    Returns the buffer's bytes, floored to 4,096, and the plans in the order their sub-pools lie: state, window,
    full. Raises UnequalRowsError (page-major), PageMapRangeError, and PoolTooSmallError when one request of
    `max_request_tokens` does not fit.
    """
    total = buffer_bytes // BUFFER_ALIGN_BYTES * BUFFER_ALIGN_BYTES
    sizes = geometry.unit_bytes(mode)
    sink_bytes = max(sizes.values())
    for pool in geometry.pools:
        if mode == "unified":
            _require_equal_rows(geometry, pool.kind)
        blocks = geometry.blocks_per_page(pool.kind) if mode == "unified" else 1
        rows = total // sizes[pool.kind] * pool.page_size * blocks
        if rows > INT32_MAX:
            raise PageMapRangeError(f"{pool.kind}.kernel_ids", rows, f"at most {INT32_MAX}: page tables hold int32")
    if geometry.state is not None and geometry.state.slot_bytes % ENVELOPE_ALIGN_BYTES:
        raise InputError("state.slot_bytes", geometry.state.slot_bytes, f"a multiple of {ENVELOPE_ALIGN_BYTES}")
    slots = 0 if geometry.state is None else MIN_STATE_SLOTS
    need = bytes_for_pages(geometry, mode, pages_for(max_request_tokens, geometry.page_size), slots)
    if total < need:
        beside = f", {slots} state slots" if slots else ""
        expected = f"at least {need} for the sink{beside} and one request of {max_request_tokens} tokens"
        raise PoolTooSmallError("buffer_bytes", total, expected)
    return total, {
        kind: SpanPlan(kind=kind, page_bytes=size, num_pages=total // size, min_page=math.ceil(sink_bytes / size))
        for kind, size in sizes.items()
    }


def _require_equal_rows(geometry: RunnerGeometry, kind: KVKind) -> None:
    """A page-major page is a uniform array of rows: K, V and what a draft keeps behind them are of one width."""
    host, *drafts = geometry.rows_of(kind)
    want = f"{host.k_row_bytes}, the K row: a page is a uniform array of rows"
    if not host.is_latent and host.k_row_bytes != host.v_row_bytes:
        raise UnequalRowsError(f"{kind}.v_row_bytes", host.v_row_bytes, want)
    for draft in drafts:
        for name in ("k_row_bytes", "v_row_bytes"):
            width = getattr(draft, name)
            if width != host.k_row_bytes and not (draft.is_latent and width == 0):
                raise UnequalRowsError(f"draft.{kind}.{name}", width, want.replace("the K row", "the host's row"))
