"""Every composition of sub-pools that a runner may have, small, and where its rows lie by a second derivation."""

import dataclasses
from collections.abc import Callable, Iterator

import torch

from suite.kernels.allocators.paged import PageAllocator, StaticAllocator
from suite.kernels.allocators.window import UnifiedAllocator
from suite.kernels.geometry import KVGeometry, RunnerGeometry, bytes_for_pages
from suite.kernels.ids import KVKind
from suite.kernels.pools import KVPool
from suite.kernels.pools.state import StateGeometry
from suite.kernels.pools.static import StaticPool
from suite.kernels.pools.unified import UNIFIED_POOLS
from tests import tiny

MODES = ("static", "unified", "unified_token_major")
SMALL_STATE = StateGeometry(layers=(20,), conv_dim=8, v_heads=1, v_dim=2, k_dim=3)  # 72 bytes, less than any page
LARGE_STATE = StateGeometry(layers=(20, 21), conv_dim=8, v_heads=2, v_dim=16, k_dim=8)  # 2,144 bytes, more than a page


def _latent(layers: int, page_size: int) -> KVGeometry:
    return KVGeometry(
        kind=KVKind.FULL,
        layers=tuple(range(layers)),
        kv_heads=1,
        head_dim=24,
        v_head_dim=16,
        is_latent=True,
        dtype=torch.float32,
        page_size=page_size,
    )


def _shape(full: int, window: int = 0, *, state: StateGeometry | None = None, page_size: int = 4) -> RunnerGeometry:
    return dataclasses.replace(tiny.geometry(page_size, full, window), state=state)


COMPOSITIONS: dict[str, RunnerGeometry] = {
    "full": _shape(2),
    "window + full": _shape(2, 3),
    "window + full, page 1": _shape(3, 1, page_size=1),
    "state + full": _shape(3, state=LARGE_STATE),
    "state + window + full": _shape(2, 3, state=LARGE_STATE),
    "small state + window + full": _shape(1, 2, state=SMALL_STATE),
    "MLA": RunnerGeometry(full=_latent(3, 4)),
    "state + MLA, one layer, page 1": RunnerGeometry(full=_latent(1, 1), state=SMALL_STATE),
    "window + full, fused draft of both": dataclasses.replace(_shape(2, 3), draft=_shape(1, 2)),
    "state + full, fused draft": dataclasses.replace(_shape(2, state=LARGE_STATE), draft=_shape(2)),
}


def build(
    mode: str,
    shape: RunnerGeometry,
    *,
    pages: int = 20,
    slots: int = 6,
    poison: bool = True,
    eager: bool = False,
    wait_for_forward: Callable[[], None] | None = None,
) -> PageAllocator:
    """About `pages` joint pages and `slots` slots beside the sink; the static window pool gets half as many."""
    if mode == "static":
        counts = {pool.kind: pages // (1 + (pool.kind is KVKind.WINDOW)) for pool in shape.pools}
        return StaticAllocator(StaticPool(shape, counts | {"state": slots + 1}, "cpu", poison=poison))
    sizes = shape.unit_bytes(mode)
    size = max(sizes.values()) + sum(n * (slots if kind == "state" else pages) for kind, n in sizes.items())
    pool = UNIFIED_POOLS[mode](shape, max(size, bytes_for_pages(shape, mode, 1, 3)), 4, "cpu", poison=poison)
    return UnifiedAllocator(pool, wait_for_forward=wait_for_forward, eager=eager)


def rows(allocator: PageAllocator, kind: KVKind, page: int) -> slice | None:
    """Where virtual `page` lies in a view of `kind`, derived apart from the translator; None if it is unmapped."""
    page_map = allocator.page_map(kind)
    at = page if page_map is None else int(page_map[page])
    if at < 0:
        return None
    first = at * allocator.pool.page_multiplier(kind) * allocator.page_size
    return slice(first, first + allocator.page_size)


def owners(allocator: PageAllocator) -> Iterator[tuple[int, KVPool]]:
    """The runner's pool, then its draft's."""
    yield 0, allocator.pool
    if allocator.pool.draft is not None:
        yield 1, allocator.pool.draft


def stamp(allocator: PageAllocator, kind: KVKind, page: int, where: slice) -> None:
    """Write the page's number into every row of it."""
    for views, number in _sides(allocator, kind):
        views[where] = page + number


def wrongly_stamped(allocator: PageAllocator, kind: KVKind, places: dict[int, slice]) -> list[int]:
    """The pages, of those at `places`, of which any row does not hold what `stamp` wrote there."""
    if not places:
        return []
    pages = torch.tensor(list(places))
    at = torch.tensor([where.start for where in places.values()])[:, None] + torch.arange(allocator.page_size)
    wrong = torch.zeros(len(pages), dtype=torch.bool)
    for view, number in _sides(allocator, kind):
        wrong |= (view[at].flatten(1) != (pages + number)[:, None]).any(1)
    return pages[wrong].tolist()


def is_clear(allocator: PageAllocator, kind: KVKind, where: slice) -> bool:
    return not any(bool(view[where].any()) for view, _ in _sides(allocator, kind))


def _sides(allocator: PageAllocator, kind: KVKind) -> Iterator[tuple[torch.Tensor, int]]:
    """Every view whose rows belong to pages of `kind`, with a number of its own."""
    for owner, pool in owners(allocator):
        for part in pool.geometry.pools:
            for layer in part.layers if part.kind is kind else ():
                yield pool.k_view(layer), 1000 * layer + 100_000 * owner
                if not part.is_latent:
                    yield pool.v_view(layer), 1000 * layer + 100_000 * owner + 500_000
