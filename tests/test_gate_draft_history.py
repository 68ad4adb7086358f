"""Decisions over drafts and over nights: floors, lengths, positions, steps, and creep."""

import numpy as np
import pytest
from msgspec.structs import replace

from suite.e2e.gate.smoke import harmed
from suite.e2e.gate.synthetic import series_of_values
from tests.gate_rig import make_policy
from tests.test_gate_decide import change_arm, clean, of, say


def test_a_draft_at_the_floor_fails_at_normal_speed():
    policy = make_policy(
        endpoints={
            "accept": {
                "kind": "accept",
                "margin": 0.05,
                "min_prompts": 40,
                "floor": 1.05,
                "fail_when": "beyond_margin",
            },
            "positions": {"kind": "positions"},
        },
        cells=[{"select": {"family": "engine"}, "endpoints": ["accept", "positions"], "min_cells": 1}],
    )
    inputs = clean(policy)
    assert say(inputs, policy).verdict == "PASS"
    floor = harmed(
        inputs, lambda row: replace(row, counters={**row.counters, "verify_passes": row.counters["accept_tokens"]})
    )
    decision = say(floor, policy)
    assert "mis-addressed draft" in of(decision, "accept").reason
    assert decision.exit_code == 1
    both = change_arm(
        floor, 0, lambda row: replace(row, counters={**row.counters, "verify_passes": row.counters["accept_tokens"]})
    )
    assert say(both, policy).exit_code == 3
    for broken in ({}, {"accept_tokens": [None] * 60}, {"accept_tokens": ["nan"] * 60}, {"accept_tokens": []}):
        assert say(harmed(inputs, lambda row, broken=broken: replace(row, counters=broken)), policy).exit_code == 3
    more = harmed(inputs, lambda row: replace(row, counters={**row.counters, "accepted_at": [[99] * 4] * 60}))
    assert "more drafts were accepted than proposed" in of(say(more, policy), "positions").reason


def test_unequal_lengths_need_tokens_by_pass():
    policy = make_policy(
        endpoints={
            "accept": {"kind": "accept", "margin": 0.05, "min_prompts": 40, "floor": 1.05, "fail_when": "beyond_margin"}
        },
        cells=[{"select": {"family": "engine"}, "endpoints": ["accept"], "min_cells": 1}],
    )
    inputs = clean(policy)
    longer = harmed(inputs, lambda row: replace(row, counters={**row.counters, "accept_tokens": [500] * 60}))
    assert "common length" in of(say(longer, policy), "accept").reason

    def by_pass(length):
        return lambda row: replace(row, counters={"accept_tokens": [[3] * length + [0] * (9 - length)] * 60})

    cut = change_arm(change_arm(inputs, 0, by_pass(6)), 2, by_pass(9))
    assert of(say(cut, policy), "accept").verdict == "PASS"


def history_policy():
    return make_policy(
        endpoints={
            "exact": {"kind": "exact"},
            "trend": {
                "kind": "history",
                "metric": "itl_ms",
                "alpha": 0.01,
                "min_nights": 14,
                "window": 60,
                "recent": 7,
            },
        },
        cells=[{"select": {"family": "engine"}, "endpoints": ["exact", "trend"], "min_cells": 1}],
    )


def with_series(inputs, candidate, replicate=None, **pin):
    both = [replace(series_of_values(candidate), **pin)]
    if replicate is not None:
        both.append(series_of_values(replicate, arm="replicate"))
    return replace(inputs, cells=(replace(inputs.cells[0], series=tuple(both)),))


def test_history_sees_steps_and_creep_but_not_the_machines_own():
    policy, inputs = history_policy(), clean(history_policy())
    noise = np.random.default_rng(5).normal(0.0, 0.002, 60)
    step = noise + np.r_[np.zeros(55), np.full(5, 0.02)]
    quiet = say(with_series(inputs, noise), policy)
    assert (quiet.verdict, of(quiet, "trend").verdict) == ("PASS", "QUIET")
    decision = say(with_series(inputs, step), policy)
    assert decision.verdict == "FAIL"
    assert decision.steps[0].run == "night 55"
    assert decision.steps[0].rise == pytest.approx(0.02, abs=0.003)
    own = say(with_series(inputs, step, step), policy)
    assert of(own, "trend").verdict == "QUIET"
    assert "machine's own" in of(own, "trend").reason
    old = noise + np.r_[np.zeros(30), np.full(30, 0.02)]
    assert of(say(with_series(inputs, old), policy), "trend").verdict == "QUIET"
    creeping = noise + np.linspace(0.0, 0.012, 60)
    pin = {"pinned": 0.0, "pinned_run": "long ago"}
    deaf = replace(policy.endpoints["trend"], alpha=0.0005)  # less than any permutation can show: only the CUSUM hears
    deaf = replace(policy, endpoints=policy.endpoints | {"trend": deaf})
    assert "crept away" in of(say(with_series(inputs, creeping, **pin), deaf), "trend").reason
    assert of(say(with_series(inputs, creeping), deaf), "trend").verdict == "QUIET"
    assert of(say(with_series(inputs, noise, **pin), policy), "trend").verdict == "QUIET"
    assert "3 nights" in of(say(with_series(inputs, noise[:3]), policy), "trend").reason
