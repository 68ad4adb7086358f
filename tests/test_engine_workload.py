"""Workloads are pure functions of their fields and a seed; the soak; what a cell reports of an engine."""

import functools

import pytest

from suite.e2e.engine import workload as workloads
from suite.e2e.engine.soak import Soak
from suite.e2e.matrix.engine_metrics import draft_metrics, draft_samples
from suite.e2e.matrix.measure import measure
from suite.e2e.matrix.plan import parse_plan
from suite.errors import InputError, InvariantError
from suite.records import Arm, Cell, CellJob, Workload

SMALL = {"requests": 4, "prompt_tokens": 40, "new_tokens": 6, "batch": 2, "chunk_tokens": 24}
SOAK_STEPS = 400  # each of 6: 100,000 by `python -m suite.e2e.engine.soak`


def text(number: int, tokens: int) -> list[int]:
    return [(number * 7919 + place * 31) % 251 for place in range(tokens)]


def workload(**fields) -> Workload:
    return Workload(name="w", **(SMALL | fields))


def test_equal_seeds_give_equal_schedules():
    asked = workload(requests=50, arrivals_per_step=0.25)
    first, again, other = (workloads.schedule(asked, text, seed) for seed in (1, 1, 2))
    assert [r.arrival_step for r in first] == [r.arrival_step for r in again] != [r.arrival_step for r in other]
    assert 100 < first[-1].arrival_step < 400  # 50 arrivals, 4 steps apart on average
    assert [r.sampling.seed for r in first] == [r.sampling.seed for r in again]


def test_a_shared_tree_has_a_trunk_and_branches():
    requests = workloads.schedule(workload(shared_tokens=20, branches=2), text, 1)
    beginnings = [tuple(request.prompt[:20]) for request in requests]
    assert beginnings[0] == beginnings[2] != beginnings[1] == beginnings[3]
    assert beginnings[0][:10] == beginnings[1][:10]
    assert len({tuple(request.prompt) for request in requests}) == 4
    assert {len(request.prompt) for request in requests} == {40}


@functools.cache
def outcome(pool: str, **fields):
    cell = Cell(
        family="engine",
        model="gpt-oss-mini",
        backend="reference",
        launcher="reference",
        device="cpu",
        dtype="float32",
        page_size=8,
        graph=True,
        seed=1,
        workload=workload(timing_repeats=1, **fields),
    )
    return measure(CellJob(cell=cell, arm=Arm(pool=pool), block=0, timeout_s=60))


def test_a_conversation_is_served_turn_by_turn_from_the_cache():
    got = outcome("unified", turns=2, prefix_cache=True, batch=4)
    samples = {each.metric: each.shape for each in got.samples}
    assert samples["tokens"] == (8, 6)
    assert got.metrics["cached_tokens"].value == 4 * 40  # 40 of the 45 tokens that the first turns have stored


def test_accept_lengths_are_the_scripts():
    got = outcome("unified", speculation="scripted", draft_tokens=3, script=(2, 1))
    assert got.metrics["accept_length"].value == 2.5  # 5 tokens behind the first: 3 and 2
    counters = {each.metric: each.unpack().tolist() for each in got.samples}
    assert counters["accept_tokens"] == [5] * 4
    assert counters["verify_passes"] == [2] * 4
    assert counters["accepted_at"] == [[2, 1, 0]] * 4
    assert counters["proposed_at"] == [[2, 1, 1]] * 4
    assert counters["accept_histogram"] == [0, 4, 4, 0]
    assert not got.effective["simulated_accept"]


def test_simulated_drafts_are_labelled_and_report_no_acceptance():
    got = outcome("static", speculation="simulated", draft_tokens=2, script=(2,))
    assert got.effective["simulated_accept"]
    assert not any(name.startswith("accept") for name in got.metrics)
    assert not any(each.metric.startswith("accept") for each in got.samples)


def test_strata_of_acceptance():
    assert draft_metrics([]) == {}
    assert len(draft_samples([], 3)) == 5


def test_the_unified_pool_follows_a_mix_that_shifts():
    """Sized for three long requests, the static pool holds four short ones; the same bytes hold many more."""
    fields = {"requests": 12, "batch": 4, "long_requests": 2, "long_tokens": 400, "sized_for": "long"}
    static, unified = (outcome(pool, **fields).metrics for pool in ("static", "unified"))
    assert unified["largest_batch.short"].value >= 1.5 * static["largest_batch.short"].value
    assert unified["largest_batch.long"].value >= static["largest_batch.long"].value
    assert unified["steps.mix_shift"].value < static["steps.mix_shift"].value


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shared_tokens": 40}, "shared_tokens: got 40, expected below 40"),
        ({"branches": 2}, "branches: got 2, expected 1"),
        ({"long_requests": 2}, "long_tokens: got None"),
        ({"long_requests": 2, "long_tokens": 9}, "sized_for: got None"),
        ({"mixed": True, "chunk_tokens": 2}, "mixed: got True, expected chunk_tokens above the batch of 2"),
        ({"speculation": "ngram"}, "draft_tokens: got None"),
        ({"draft_tokens": 2}, "draft_tokens: got 2"),
        ({"speculation": "scripted", "draft_tokens": 2}, "script: got None"),
        ({"speculation": "scripted", "draft_tokens": 2, "script": [3]}, "script: got"),
        ({"speculation": "model", "draft_tokens": 2}, "draft: got None"),
        ({"draft": "gpt-oss-mini"}, "draft: got 'gpt-oss-mini'"),
        ({"fused_draft": True}, "fused_draft: got True"),
        ({"speculation": "simulated", "draft_tokens": 1, "script": [1], "tasks": {"recall": 1}}, "tasks: got"),
    ],
    ids=str,
)
def test_fields_that_do_not_go_together_are_refused(fields, message):
    matrix = {"name": "m", "workloads": {"w": SMALL | fields}, "cells": [{}]}
    with pytest.raises(InputError, match=message):
        parse_plan(matrix)


@pytest.mark.parametrize("mode", ["static", "unified", "unified_token_major"])
@pytest.mark.parametrize("limited", [True, False])
def test_a_soak_accounts_for_every_page(mode, limited):
    counts = Soak(mode, 11, window=True, state=True, limited=limited).run(SOAK_STEPS)
    assert counts.steps >= SOAK_STEPS
    assert counts.served > 20
    assert counts.cached_tokens > 0
    assert (counts.pages_moved > 0) == (mode != "static")


def test_a_soak_sees_a_row_that_moved_without_its_map():
    soak = Soak("unified", 3)
    soak.allocator.pool.move_pages = lambda *_: None
    with pytest.raises(InvariantError, match="holds"):
        soak.run(SOAK_STEPS)
