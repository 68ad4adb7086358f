"""The prefix cache: what it shares, what it refuses to share, and what it gives back when room runs short."""

import random

import pytest
import torch

from suite.e2e.engine.memory import RequestMemory
from suite.e2e.engine.prefix_cache import PrefixCache
from suite.e2e.engine.requests import Request
from suite.errors import InvariantError, OutOfPagesError
from suite.kernels.ids import KVKind
from tests import tiny

PREFIX = [random.Random(1).randrange(tiny.VOCAB) for _ in range(30)]


def family(count: int = 5, every: int = 12) -> list[Request]:
    """Prompts that begin alike, one after the other, so that the later ones find the first's pages."""
    rng = random.Random(9)
    return [
        Request(
            prompt=PREFIX + [rng.randrange(tiny.VOCAB) for _ in range(5 + index)],
            max_new_tokens=8,
            arrival_step=every * index,
        )
        for index in range(count)
    ]


def served(work: list[Request], pool: str = "unified", **changes):
    engine = tiny.engine(pool, **changes)
    engine.run(work)
    return [request.output for request in work], engine


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return served(family())[0]


@pytest.mark.parametrize("changes", [{}, {"page_size": 1}, {"pool_pages": 14}, {"mixed": True}, {"chunk_tokens": 5}])
@pytest.mark.parametrize("pool", ["static", "unified"])
def test_cached_prompts_give_the_same_tokens(plain, pool, changes):
    work = family()
    tokens, engine = served(work, pool, prefix_cache=True, **({"snapshot_tokens": 4} | changes))
    assert tokens == plain
    assert work[0].cached_tokens == 0
    if "pool_pages" not in changes:
        assert [request.cached_tokens for request in work[1:]] == [30 - 30 % engine.config.page_size] * 4
    assert engine.allocator.live_pages(KVKind.FULL) == 0


def test_arms_find_the_same_tokens_in_the_cache_when_room_is_short():
    found = []
    for pool in ("static", "unified"):
        work = family(8, every=2)
        served(work, pool, prefix_cache=True, pool_pages=18)
        found.append([(r.cached_tokens, r.retractions, r.first_step, r.last_step) for r in work])
    assert found[0] == found[1]
    assert any(cached for cached, *_ in found[0])


def test_a_conversation_goes_on_from_its_own_answer():
    first = Request(prompt=PREFIX, max_new_tokens=8)
    engine = tiny.engine("unified", prefix_cache=True)
    engine.run([first])
    second = Request(prompt=[*first.tokens, 1, 2, 3], max_new_tokens=6, arrival_step=50)
    again = Request(prompt=list(PREFIX), max_new_tokens=8)
    engine.run([again, second])
    assert again.output == first.output
    assert second.cached_tokens == 36  # 30 prompt tokens and 7 stored answers make 9 whole pages
    assert second.output == served([Request(prompt=second.prompt, max_new_tokens=6)])[0][0]


# -- the tree alone ----------------------------------------------------------------------------------


def tree(pool: str = "static", window: int = 3, pages: int = 40):
    allocator = tiny.allocator(pool, tiny.geometry(window=window), pages=pages, poison=False)
    return allocator, PrefixCache(allocator)


def put(allocator, cache: PrefixCache, tokens: list[int]) -> list[int]:
    """A request that computed `tokens`, was cached and left."""
    pages = allocator.alloc(-(-len(tokens) // 4))
    cache.insert(tokens, pages)
    allocator.evict_window(pages)
    allocator.free(pages)
    return pages


def test_match_takes_whole_pages_and_never_all_tokens():
    allocator, cache = tree(window=0)
    pages = put(allocator, cache, list(range(12)))
    assert cache.match(list(range(12)), 11).pages == pages[:2]
    assert cache.match(list(range(12)), 12).pages == pages
    assert cache.match([0, 1, 2, 3, 9, 9, 9, 9, 9], 8).pages == pages[:1]
    assert cache.match([5, 1, 2, 3], 4).pages == []


@pytest.mark.parametrize("pool", ["static", "unified"])
def test_a_prefix_without_its_whole_window_is_not_reused(pool):
    allocator, cache = tree(pool)
    pages = put(allocator, cache, list(range(20)))
    cache.tombstone(lambda: True)
    # the window of 8 before position 20 begins at 13: pages 3 and 4 stay, the others are tombstones
    assert [allocator.has_window(page) for page in pages] == [False, False, False, True, True]
    assert cache.match(list(range(40)), 39).pages == pages
    assert cache.match(list(range(16)) + [90] * 8, 23).pages == []
    fresh = put(allocator, cache, list(range(16)))  # the same beginning, its window rows live: they take the place
    assert cache.match(list(range(16)) + [90] * 8, 23).pages == [*fresh[:3], pages[3]]
    cache.check()


def test_eviction_takes_the_least_recently_used_leaf_and_then_its_parent():
    allocator, cache = tree(window=0)
    old = put(allocator, cache, list(range(8)))
    put(allocator, cache, [*list(range(4)), 50, 51, 52, 53])
    used = put(allocator, cache, [60, 61, 62, 63])
    cache.match([*list(range(4)), 50, 51, 52, 53, 0], 8)
    free = allocator.available_pages()
    assert cache.evict(lambda: allocator.available_pages() < free + 1)
    assert allocator.holders(old[1]) == 0
    assert cache.evict(lambda: allocator.available_pages() < free + 2)
    assert allocator.holders(used[0]) == 0
    assert not cache.evict(lambda: True)
    allocator.check()
    assert allocator.live_pages(KVKind.FULL) == cache.size == 0


def test_a_shared_page_outlives_the_tree():
    allocator, cache = tree()
    pages = put(allocator, cache, list(range(8)))
    shared = cache.match(list(range(9)), 8).pages
    allocator.share(shared)
    cache.clear()
    assert [allocator.holders(page) for page in pages] == [1, 1]
    allocator.check()
    allocator.evict_window(shared)
    allocator.free(shared)
    assert allocator.available_pages() == allocator.most_pages()


def test_reclaimable_counts_what_nobody_else_holds():
    allocator, cache = tree()
    pages = put(allocator, cache, list(range(16)))
    assert cache.reclaimable() == 4
    allocator.share(pages[:2])
    assert cache.reclaimable() == 2
    cache.tombstone(lambda: True)  # window of 8 before 16 begins at 9: page 2 on
    assert cache.reclaimable() == 2
    free = allocator.available_pages()
    cache.evict(lambda: True)
    assert allocator.available_pages() == free + 2


def test_a_foreign_page_in_the_tree_is_seen():
    allocator, cache = tree()
    pages = put(allocator, cache, list(range(8)))
    allocator.free(pages[1:])  # somebody gives back what the tree holds
    with pytest.raises(InvariantError, match="has no holder"):
        cache.check()
    with pytest.raises(OutOfPagesError):
        allocator.alloc(1000)


def test_who_leaves_a_shared_prefix_stops_reading_its_window():
    """The tree has given these window rows up before: the sharer was their last reader."""
    allocator, _ = tree("unified")
    memory = RequestMemory(allocator, torch.zeros(3, 48, dtype=torch.int32), prefix_cache=True)
    first = Request(prompt=list(range(36)), max_new_tokens=1)
    assert memory.attach(first, 1, [])
    memory.grow([first], [36])
    first.computed = 36
    memory.release([first])
    sharer = Request(prompt=[*range(20), 90], max_new_tokens=1)
    assert memory.attach(sharer, 2, [])
    shared = list(sharer.pages)
    memory.cache.tombstone(lambda: True)
    assert [allocator.has_window(page) for page in shared] == [False, False, False, True, True]
    memory.release([sharer])
    assert not any(allocator.has_window(page) for page in shared)
    memory.cache.evict(lambda: True)
    memory.check([])
    allocator.check()
