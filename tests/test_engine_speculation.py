"""Drafts change how fast tokens come, never which; what is reported of them is what happened."""

import functools
import random

import pytest
import torch

from suite.e2e.engine.engine import Engine
from suite.e2e.engine.requests import Request
from suite.e2e.engine.sampler import GREEDY, Sampling, uniform
from suite.e2e.engine.speculative import accept_by_match, accept_by_rejection
from suite.errors import InputError
from suite.kernels.ids import KVKind
from tests import tiny

NEW_TOKENS = 14
DRAFTS = 3


def requests(count: int = 5, *, sampled: bool = False, new_tokens: int = NEW_TOKENS) -> list[Request]:
    rng = random.Random(5)
    return [
        Request(
            prompt=[rng.randrange(12) for _ in range(rng.randrange(3, 40))],
            max_new_tokens=new_tokens,
            keep_logits=True,
            sampling=Sampling(temperature=0.7, top_p=0.9, seed=index) if sampled else GREEDY,
        )
        for index in range(count)
    ]


@functools.cache
def plain(sampled: bool = False) -> tuple[list[list[int]], torch.Tensor]:
    work = requests(sampled=sampled)
    tiny.engine("unified").run(work)
    return [request.output for request in work], torch.stack([row for r in work for row in r.logits])


def drafting(pool: str = "unified", speculation: str = "ngram", **changes) -> Engine:
    fields = {"speculation": speculation, "draft_tokens": DRAFTS, "script": (2, 0, 3, 1)}
    truth = {tuple(request.prompt): output for request, output in zip(requests(), plain()[0], strict=True)}
    return tiny.engine(pool, **(fields | changes), draft=tiny.model(), truth=truth)


# drafts that a model draws for sampled requests keep the distribution, not the tokens: tested below
@pytest.mark.parametrize(
    ("speculation", "sampled"),
    [("scripted", False), ("scripted", True), ("ngram", False), ("ngram", True), ("model", False)],
)
@pytest.mark.parametrize("pool", ["static", "unified"])
def test_drafts_change_no_token(pool, speculation, sampled):
    work = requests(sampled=sampled)
    engine = drafting(pool, speculation)
    engine.run(work)
    assert [request.output for request in work] == plain(sampled)[0]
    logits = torch.stack([row for r in work for row in r.logits])
    assert torch.allclose(logits, plain(sampled)[1], rtol=1e-4, atol=1e-4)
    assert engine.allocator.live_pages(KVKind.FULL) == 0
    assert sum(request.drafts.accept_tokens for request in work) + len(work) == sum(len(r.output) for r in work)
    if speculation != "ngram":
        assert sum(request.drafts.verify_passes for request in work) < sum(len(r.output) for r in work) - len(work)


@pytest.mark.parametrize("pool", ["static", "unified", "unified_token_major"])
@pytest.mark.parametrize(
    "changes", [{"poison": True}, {"prefix_cache": True, "snapshot_tokens": 4, "pool_pages": 20}], ids=str
)
def test_a_fused_draft_reads_its_own_rows_behind_the_targets(pool, changes):
    """The target as its own draft: always right, unless its rows are looked for elsewhere."""
    work = requests()
    drafting(pool, "model", fused_draft=True, **changes).run(work)
    assert [request.output for request in work] == plain()[0]
    assert all(request.drafts.accepted_at == request.drafts.proposed_at for request in work)


@pytest.mark.parametrize("pool", ["static", "unified"])
def test_the_scripted_draft_reports_its_script(pool):
    """The window is cut where the request ends: behind its last draft comes one more token."""
    work = requests()
    drafting(pool, "scripted").run(work)
    for request in work:
        left, want = NEW_TOKENS - 1, []
        while left:
            want.append(min((2, 0, 3, 1)[len(want) % 4], left - 1) + 1)
            left -= want[-1]
        counters = request.drafts
        assert counters.lengths == want
        assert counters.verify_passes == len(want)
        assert counters.accept_tokens == sum(want) == NEW_TOKENS - 1
        assert counters.accepted_at == [sum(length - 1 > place for length in want) for place in range(DRAFTS)]


def test_a_simulated_pattern_is_followed_whatever_the_target_says():
    work = requests()
    drafting("unified", "simulated", script=(3, 1)).run(work)
    assert all(request.drafts.lengths == [4, 2, 4, 2, 1] for request in work)
    assert all(len(request.output) == NEW_TOKENS for request in work)


def test_the_target_as_its_own_draft_is_always_right():
    work = requests()
    drafting("unified", "model").run(work)
    for request in work:
        assert request.drafts.accepted_at == request.drafts.proposed_at
        assert request.drafts.lengths == [4, 4, 4, 1]  # 13 tokens behind the first


def test_ngram_drafts_what_followed_before():
    from suite.e2e.engine.drafts import NgramDrafter

    request = Request(prompt=[1, 2, 3, 4, 1, 2, 3, 5, 9, 1, 2, 3], max_new_tokens=9)
    drafter = NgramDrafter(3)
    assert drafter.drafts_for(request, 3) == [5, 9, 1]
    request.accept(4)  # 2 3 4 was followed by 1
    assert drafter.drafts_for(request, 2) == [1, 2]
    request.accept(77)
    assert drafter.drafts_for(request, 2) == []


@pytest.mark.parametrize("speculation", ["scripted", "model"])
def test_retraction_and_the_prefix_cache_with_drafts(speculation):
    work = requests()
    engine = drafting("unified", speculation, pool_pages=20, prefix_cache=True, snapshot_tokens=4)
    engine.run(work)
    assert [request.output for request in work] == plain()[0]
    assert engine.scheduler.retractions > 0


def test_a_stop_token_ends_a_window_early():
    work, stop = requests(), plain()[0][0][5]
    work[0].stop = frozenset({stop})
    drafting("unified", "scripted", script=(3,)).run(work)
    assert work[0].output == plain()[0][0][: plain()[0][0].index(stop)]


def test_acceptance_by_match():
    assert accept_by_match([], [7]) == [7]
    assert accept_by_match([1, 2], [1, 2, 3]) == [1, 2, 3]
    assert accept_by_match([1, 2], [1, 9, 3]) == [1, 9]
    assert accept_by_match([1, 2], [9, 2, 3]) == [9]


def test_acceptance_by_rejection_keeps_the_targets_distribution():
    """First and second token of 5,000 passes against p, by chi square; the draft's distribution is far from it."""
    target = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]])
    chances = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]])
    rounds, first, second, accepted = 5000, torch.zeros(4), torch.zeros(4), 0
    cumulative = chances.cumsum(-1)
    for index in range(rounds):
        drafts = [int((cumulative[i] <= uniform(index, i, 5)).sum()) for i in range(2)]
        numbers = [uniform(index, i, 1) for i in range(2)]
        got = accept_by_rejection(target, chances, drafts, numbers, uniform(index, 0, 2))
        first[got[0]] += 1
        accepted += len(got) > 1
        if len(got) > 1:
            second[got[1]] += 1
    assert first[3] == 0
    expected = target[0, :3] * rounds
    assert float(((first[:3] - expected) ** 2 / expected).sum()) < 13.8  # 2 degrees, 0.1 %
    expected = target[1] * accepted
    assert float(((second - expected) ** 2 / expected).sum()) < 16.3  # 3 degrees, 0.1 %
    assert abs(accepted / rounds - 0.5) < 0.03  # sum of min(p, q): 0.1 + 0.2 + 0.2


def test_equal_distributions_accept_everything():
    same = torch.tensor([[0.2, 0.8], [0.5, 0.5]])
    for index in range(200):
        drafts = [int(uniform(index, 0, 5) >= 0.2)]
        assert len(accept_by_rejection(same, same[:1], drafts, [uniform(index, 0, 1)], 0.5)) == 2


def test_drawn_drafts_of_the_same_model_are_accepted_and_shape_nothing():
    work = [
        Request(prompt=[5, 6, 7], max_new_tokens=3, sampling=Sampling(temperature=0.8, seed=seed)) for seed in range(60)
    ]
    drafting("unified", "model", max_batch=16).run(work)
    assert all(r.drafts.accepted_at == r.drafts.proposed_at for r in work if r.drafts.verify_passes)
    again = [Request(prompt=r.prompt, max_new_tokens=3, sampling=r.sampling) for r in work]
    tiny.engine("unified", max_batch=16).run(again)
    counts = [[sum(r.output[1] == token for r in each) for token in range(tiny.VOCAB)] for each in (work, again)]
    assert sum(abs(a - b) for a, b in zip(*counts, strict=True)) <= 60  # of at most 120: overlap of two samples


def test_speculation_needs_what_it_drafts_with():
    for speculation, name in (("scripted", "truth"), ("model", "draft")):
        with pytest.raises(InputError, match=f"{name}: got None"):
            tiny.engine(speculation=speculation, draft_tokens=2, script=(1,))
    with pytest.raises(InputError, match="script: got"):
        drafting("static", "scripted", script=(4,))
