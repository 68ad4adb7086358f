"""From a configuration to a pool and its allocator, both arms from the same numbers."""

import torch

from suite.e2e.engine.churn import Churn
from suite.e2e.engine.config import EngineConfig
from suite.kernels.allocators.paged import PageAllocator, StaticAllocator
from suite.kernels.allocators.window import UnifiedAllocator
from suite.kernels.geometry import STATE, RunnerGeometry, bytes_for_pages
from suite.kernels.pools.static import StaticPool
from suite.kernels.pools.unified import UNIFIED_POOLS
from suite.records import PoolMode


def engine_allocator(geometry: RunnerGeometry, config: EngineConfig) -> PageAllocator:
    """Room for the configured pages beside the churn stage's ballast, or exactly the bytes of `config.split`."""
    if config.split is not None:
        return split_allocator(
            geometry, config.pool, config.split, config.max_context, config.device, poison=config.poison
        )
    pages = config.pool_pages or config.request_pages
    return build_allocator(
        geometry,
        config.pool,
        pages + Churn.ballast_pages(pages),
        min(config.max_context + config.draft_tokens, pages * config.page_size),
        config.device,
        slots=config.max_batch + (config.snapshots if config.prefix_cache else 0),
        poison=config.poison,
    )


def build_allocator(
    geometry: RunnerGeometry,
    mode: PoolMode,
    pages: int,
    max_context: int,
    device: torch.device | str,
    *,
    slots: int = 0,
    poison: bool = False,
) -> PageAllocator:
    """A pool of `mode` and its allocator, with room for `pages` joint pages and `slots` state slots beside the sink."""
    if mode == "static":
        counts = _counts(geometry, {pool.kind: pages for pool in geometry.pools} | {STATE: slots})
        return StaticAllocator(StaticPool(geometry, counts, device, poison=poison))
    need = bytes_for_pages(geometry, mode, pages, slots)
    return UnifiedAllocator(UNIFIED_POOLS[mode](geometry, need, max_context, device, poison=poison))


def split_allocator(
    geometry: RunnerGeometry,
    mode: PoolMode,
    split: dict[str, int],
    max_context: int,
    device: torch.device | str,
    *,
    poison: bool = False,
) -> PageAllocator:
    """`split` says how many pages of each kind, and state slots, the static pool has; the unified one has its bytes."""
    if mode == "static":
        return StaticAllocator(StaticPool(geometry, _counts(geometry, split), device, poison=poison))
    sizes = {pool.kind.value: geometry.page_bytes(pool.kind, "static") for pool in geometry.pools}
    if geometry.state is not None:
        sizes[STATE] = geometry.state.slot_bytes
    total = sum((split[kind] + 1) * size for kind, size in sizes.items())
    return UnifiedAllocator(UNIFIED_POOLS[mode](geometry, total, max_context, device, poison=poison))


def _counts(geometry: RunnerGeometry, pages: dict[str, int]) -> dict[str, int]:
    """Page and slot counts with the sink and the padding slot."""
    kinds = [pool.kind.value for pool in geometry.pools] + ([STATE] if geometry.state is not None else [])
    return {kind: pages[kind] + 1 for kind in kinds}
