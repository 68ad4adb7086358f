"""Arrivals, mixed batches, retraction, cancellation and sampling: none of them changes a request's tokens."""

import random

import pytest
import torch

from suite.e2e.engine.requests import Request
from suite.e2e.engine.sampler import GREEDY, Sampling, draw, pick, probabilities, uniform
from suite.errors import InputError
from suite.kernels.ids import KVKind
from tests import tiny


def requests(count: int = 6, *, new_tokens: int = 10, sampled: bool = False, every: int = 0) -> list[Request]:
    rng = random.Random(5)
    return [
        Request(
            prompt=[rng.randrange(tiny.VOCAB) for _ in range(rng.randrange(3, 40))],
            max_new_tokens=new_tokens,
            sampling=Sampling(temperature=0.8, top_p=0.9, seed=100 + index) if sampled else GREEDY,
            arrival_step=index * every,
        )
        for index in range(count)
    ]


def outputs(work: list[Request], pool: str = "unified", **changes) -> list[list[int]]:
    engine = tiny.engine(pool, **changes)
    engine.run(work)
    assert engine.allocator.live_pages(KVKind.FULL) == 0
    return [request.output for request in work]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return outputs(requests(), "static", max_batch=1)


def test_mixed_batches_and_arrivals_change_no_token(plain):
    work = requests(every=3)
    engine = tiny.engine("unified", mixed=True, chunk_tokens=9)
    seen = []
    own = engine._run_step

    def watch(step):
        seen.append((step.mode, sorted(step.query_lens)))
        return own(step)

    engine._run_step = watch
    engine.run(work)
    assert [request.output for request in work] == plain
    assert any(lens[0] == 1 and lens[-1] > 1 for _, lens in seen)  # decoding beside a chunk
    assert all(sum(lens) <= 9 for _, lens in seen)
    assert all(request.first_step >= request.arrival_step for request in work)


@pytest.mark.parametrize("mixed", [False, True])
def test_retracted_requests_come_back_with_the_same_tokens(plain, mixed):
    schedules = []
    for pool in ("static", "unified"):
        work = requests()
        engine = tiny.engine(pool, pool_pages=16, mixed=mixed)
        engine.run(work)
        assert [request.output for request in work] == plain
        assert engine.scheduler.retractions == sum(request.retractions for request in work) > 0
        schedules.append([(request.first_step, request.last_step, request.retractions) for request in work])
    assert schedules[0] == schedules[1]  # the arms decide alike


def test_the_youngest_steps_back():
    engine = tiny.engine("static", pool_pages=12)
    work = [Request(prompt=list(range(18)), max_new_tokens=20), Request(prompt=list(range(20)), max_new_tokens=20)]
    engine.run(work)
    assert (work[0].retractions, work[1].retractions) == (0, 1)
    assert work[0].last_step < work[1].last_step


def test_a_scored_prompt_that_is_retracted_counts_no_token_twice():
    prompt, continuation = [*requests()[0].prompt, 7, 8], list(range(20))
    want = tiny.engine("unified").score([prompt], [continuation])[0][0]
    engine = tiny.engine("unified", pool_pages=6 + 11 + 2, max_batch=2, chunk_tokens=3, mixed=True)
    scored = Request(prompt=prompt + continuation, score_from=len(prompt), arrival_step=4)
    engine.run([Request(prompt=list(range(20)), max_new_tokens=50), scored])
    assert scored.retractions > 0
    assert scored.loglikelihood == pytest.approx(want, rel=1e-6)


def test_cancelled_requests_leave_nothing_and_change_nobody(plain):
    work = requests()
    work[1].cancel_after = 3
    assert outputs(work)[1] == plain[1][:3]
    assert [request.output for request in work[2:]] == plain[2:]
    engine = tiny.engine("unified")
    work = requests()
    own, victims = engine._run_step, [work[0], work[5]]  # one runs, one waits

    def cancel(step):
        stored = own(step)
        if victims:
            engine.scheduler.finish(step, stored)
            engine.scheduler.cancel(victims.pop())
            step.requests.clear()
            step.query_lens.clear()
        return stored

    engine._run_step = cancel
    engine.run(work)
    assert [request.output for request in work[1:5]] == plain[1:5]
    assert engine.allocator.live_pages(KVKind.FULL) == 0


def test_a_request_waits_for_its_arrival_and_the_clock_does_not_idle():
    engine = tiny.engine("static")
    work = [Request(prompt=[1, 2], max_new_tokens=2, arrival_step=500), Request(prompt=[3], max_new_tokens=2)]
    engine.run(work)
    assert work[1].last_step < 10
    assert work[0].first_step == 500


@pytest.mark.parametrize("change", [{"max_batch": 1}, {"chunk_tokens": 5}, {"pool_pages": 16}, {"pool": "static"}])
def test_sampled_tokens_belong_to_the_request(change):
    plain = outputs(requests(sampled=True))
    assert outputs(requests(sampled=True), **change) == plain
    assert plain != outputs(requests())


def test_random_numbers_are_uniform_and_streams_differ():
    numbers = torch.tensor([uniform(seed, position) for seed in range(20) for position in range(200)])
    counts = torch.histc(numbers, bins=16, min=0, max=1)
    expected = len(numbers) / 16
    assert float(((counts - expected) ** 2 / expected).sum()) < 37.7  # chi square, 15 degrees, 0.1 %
    assert len({uniform(1, 2, stream) for stream in range(8)} | {uniform(2, 1), uniform(1, 2)}) == 9


def test_top_p_keeps_the_smallest_likely_set_and_draws_follow_it():
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1], [0.1, 0.15, 0.25, 0.5]]).log()
    got = probabilities(logits, [Sampling(temperature=1, top_p=0.7), GREEDY])
    assert torch.allclose(got, torch.tensor([[2 / 3, 1 / 3, 0, 0], [0, 0, 0, 1.0]]))
    tokens = draw(got[:1].expand(3000, 4), [uniform(7, position) for position in range(3000)])
    assert abs(float((tokens == 0).float().mean()) - 2 / 3) < 0.03
    assert int(tokens.max()) == 1
    hot = pick(logits[:1].expand(500, 4), [Sampling(temperature=4.0, seed=s) for s in range(500)], [0] * 500)
    assert set(hot) == {0, 1, 2, 3}


def test_bad_scheduling_input_is_refused():
    with pytest.raises(InputError, match="chunk_tokens: got 4, expected above 4"):
        tiny.engine(mixed=True, chunk_tokens=4)
    with pytest.raises(InputError, match="temperature: got -1"):
        Sampling(temperature=-1)
    with pytest.raises(InputError, match="top_p: got 0"):
        Sampling(top_p=0)
    with pytest.raises(InputError, match="cancel_after: got 0"):
        Request(prompt=[1], max_new_tokens=1, cancel_after=0)
    with pytest.raises(InputError, match="draft_tokens: got 0"):
        tiny.engine(speculation="ngram")
