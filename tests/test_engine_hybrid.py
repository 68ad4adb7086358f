"""Recurrent state in the engine: slots, snapshots, branches, and nothing left behind by rejected drafts."""

import functools
import random

import pytest
import torch

from suite.e2e.engine.requests import Request
from suite.kernels.ids import KVKind
from suite.kernels.pools.state import KernelSlots, VirtualSlots
from tests import tiny, tiny_hybrid

NEW_TOKENS = 10


def requests(count: int = 5, every: int = 0, prefix: int = 0) -> list[Request]:
    rng = random.Random(5)
    begin = [rng.randrange(tiny.VOCAB) for _ in range(prefix)]
    return [
        Request(
            prompt=begin + [rng.randrange(tiny.VOCAB) for _ in range(rng.randrange(3, 30))],
            max_new_tokens=NEW_TOKENS,
            arrival_step=every * index,
        )
        for index in range(count)
    ]


def served(work: list[Request], pool: str = "unified", **changes):
    engine = tiny_hybrid.engine(pool, **changes)
    engine.run(work)
    assert engine.allocator.live_pages(KVKind.FULL) == 0
    assert engine.allocator.slots.live_slots() == len(engine.allocator.slots.snapshots) == 0
    return [request.output for request in work], engine


@functools.cache
def plain(prefix: int = 0) -> list[list[int]]:
    return served(requests(prefix=prefix), "static", max_batch=1, graph=False)[0]


@pytest.mark.parametrize("pool", ["static", "unified"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"graph": False, "poison": True}, {"chunk_tokens": 5, "mixed": True}, {"pool_pages": 14}],
    ids=str,
)
def test_states_follow_their_requests(pool, changes):
    tokens, engine = served(requests(), pool, **changes)
    assert tokens == plain()
    if "pool_pages" in changes:
        assert engine.scheduler.retractions > 0


@pytest.mark.parametrize("pool", ["static", "unified"])
@pytest.mark.parametrize(
    "changes", [{}, {"snapshots": 1}, {"pool_pages": 20}, {"poison": True, "mixed": True}], ids=str
)
def test_prefixes_are_reused_with_the_state_at_their_end(pool, changes):
    work = requests(prefix=27, every=8)
    tokens, _ = served(work, pool, prefix_cache=True, **changes)
    assert tokens == plain(27)
    found = [request.cached_tokens for request in work]
    assert found[0] == 0
    assert all(cached % 8 == 0 for cached in found)
    if not changes:
        assert all(cached >= 8 for cached in found[1:])


def test_arms_find_the_same_states():
    found = []
    for pool in ("static", "unified"):
        work = requests(8, prefix=27, every=2)
        served(work, pool, prefix_cache=True, snapshots=2, pool_pages=24)
        found.append([(r.cached_tokens, r.retractions, r.first_step, r.last_step) for r in work])
    assert found[0] == found[1]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("pool", ["static", "unified"])
def test_drafts_leave_no_trace_in_the_state(pool, graph):
    for speculation in ("ngram", "model"):
        work = requests()
        tokens, _ = served(work, pool, speculation=speculation, draft_tokens=3, graph=graph)
        assert tokens == plain()
        assert sum(r.drafts.verify_passes for r in work) > 0


@pytest.mark.parametrize("pool", ["static", "unified"])
def test_the_committed_state_equals_a_replay_of_the_accepted_tokens(pool):
    """After every verify, against the same tokens fed one by one to an engine without drafts."""
    engine = tiny_hybrid.engine(pool, speculation="ngram", draft_tokens=3, max_batch=2)
    work = requests(2)
    seen: list[tuple[int, int, list[torch.Tensor]]] = []
    own = engine.runner.commit

    def commit(lengths):
        own(lengths)
        for request, stored in zip(engine.scheduler.running, lengths, strict=True):
            seen.append((work.index(request), request.computed + stored, state_of(engine, request)))

    engine.runner.commit = commit
    engine.run(work)
    assert len(seen) > 4
    replays: dict[tuple[int, int], list[torch.Tensor]] = {}
    plain_engine, again = tiny_hybrid.engine(pool, max_batch=2), requests(2)
    step = plain_engine._run_step

    def watch(which):
        stored = step(which)
        for request, length in zip(which.requests, which.query_lens, strict=True):
            replays[again.index(request), request.computed + length] = state_of(plain_engine, request)
        return stored

    plain_engine._run_step = watch
    plain_engine.run(again)
    for index, position, state in seen:
        if (index, position) in replays:  # the last tokens of a request are never stored without drafts
            for got, want in zip(state, replays[index, position], strict=True):
                assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)
    assert sum((index, position) in replays for index, position, _ in seen) > 4


def state_of(engine, request: Request) -> list[torch.Tensor]:
    slots = engine.allocator.slots
    kernel: KernelSlots = slots.kernel_slots(VirtualSlots(torch.tensor([request.slot])))
    return [stream[:, int(kernel.tensor[0])].clone() for stream in slots.pool.streams()]


def test_states_move_with_the_pages():
    _, engine = served(requests(8))
    assert engine.churn.moved_share >= 0.5
