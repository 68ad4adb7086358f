"""The judge: exact or wrong, moved or void, and no latency for what is wrong."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from db.checks import check_outcome
from suite.e2e.matrix.judge import judge, without_timings
from suite.records import Arm, Metric, Outcome, Samples
from tests.matrix_fakes import make_cell, make_outcome

CELL = make_cell()
STATIC, UNIFIED = Arm(pool="static"), Arm(pool="unified")
TIMINGS = {"itl_ms"}


def with_samples(**arrays):
    outcome = make_outcome()
    kept = [samples for samples in outcome.samples if samples.metric not in arrays]
    return replace(outcome, samples=(*kept, *(Samples.pack(n, a) for n, a in arrays.items() if a is not None)))


def changed(metric, place, value):
    array = next(s for s in make_outcome().samples if s.metric == metric).unpack().copy()
    array[place] = value
    return with_samples(**{metric: array})


def rule(outcome, static=None, arm=UNIFIED):
    ruling = judge(CELL, arm, outcome, make_outcome() if static is None else static)
    check_outcome(ruling.outcome)  # whatever is ruled can be a row
    if ruling.outcome.status != "passed":
        assert not TIMINGS & {*ruling.outcome.metrics, *(s.metric for s in ruling.outcome.samples)}
    return ruling


def test_an_exact_arm_passes_with_its_distance():
    ruling = rule(make_outcome())
    assert ruling.outcome.status == "passed"
    assert ruling.outcome.metrics["max_logit_diff"] == Metric(value=0.0, unit="logit", n=128)
    assert ruling.outcome.metrics["token_mismatches"] == Metric(value=0.0, unit="tokens", n=8)
    assert set(ruling.outcome.metrics) >= TIMINGS
    assert ruling.exactness.exact


@given(row=st.integers(0, 7), column=st.integers(0, 15), ulps=st.integers(1, 1000), up=st.booleans())
def test_one_logit_one_ulp_off_is_wrong(row, column, ulps, up):
    logits = make_outcome().samples[0].unpack().copy()
    for _ in range(min(ulps, 3)):
        logits[row, column] = np.nextafter(logits[row, column], np.float32(math.inf if up else -math.inf))
    outcome = rule(with_samples(logits=logits)).outcome
    assert (outcome.status, outcome.reason_code) == ("wrong", "logits_differ")
    assert outcome.metrics["max_logit_diff"].value > 0
    assert "0 of 8 tokens differ" in outcome.reason


def test_the_distance_is_the_largest_and_the_reason_has_the_numbers():
    outcome = rule(changed("logits", (3, 4), 1000.0)).outcome
    reference = make_outcome().samples[0].unpack()[3, 4]
    assert outcome.metrics["max_logit_diff"].value == pytest.approx(1000.0 - reference)
    assert "of 8 tokens" in outcome.reason
    assert "over 128 values" in outcome.reason


def test_one_token_off_is_wrong():
    outcome = rule(changed("tokens", (1, 2), -1)).outcome
    assert (outcome.status, outcome.reason_code) == ("wrong", "logits_differ")
    assert outcome.metrics["token_mismatches"].value == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("both", [False, True])
def test_a_nan_is_never_equal_and_an_infinity_only_to_itself(bad, both):
    arm = changed("logits", (0, 0), bad)
    ruling = rule(arm, static=arm if both else None)
    if both and math.isinf(bad):
        assert ruling.outcome.status == "passed"
        return
    assert (ruling.outcome.status, ruling.outcome.reason_code) == ("wrong", "logits_differ")
    assert "max_logit_diff" not in ruling.outcome.metrics
    assert ("nan" if math.isnan(bad) else "inf") in ruling.outcome.reason


@pytest.mark.parametrize(
    ("outcome", "code", "reason"),
    [
        (with_samples(logits=np.zeros((8, 15))), "shapes_differ", "[8, 16] static and [8, 15] unified"),
        (with_samples(tokens=np.zeros((4, 2))), "shapes_differ", "tokens of shapes"),
        (with_samples(logits=None), "not_comparable", "the unified arm has no samples of logits"),
        (with_samples(tokens=None), "not_comparable", "no samples of tokens"),
        (make_outcome(prompt_hash="others"), "not_comparable", "prompt_hash is prompts"),
        (make_outcome(prompt_hash=None), "not_comparable", "prompt_hash"),
    ],
)
def test_what_cannot_be_compared_is_wrong(outcome, code, reason):
    ruled = rule(outcome).outcome
    assert (ruled.status, ruled.reason_code) == ("wrong", code)
    assert reason in ruled.reason
    assert "max_logit_diff" not in ruled.metrics


def test_two_unknowns_are_not_equal():
    unknown = make_outcome(prompt_hash=None)
    assert rule(unknown, static=unknown).outcome.reason_code == "not_comparable"


def test_no_logits_at_all_prove_nothing():
    empty = with_samples(logits=np.zeros((0, 16)))
    assert rule(empty, static=empty).outcome.reason_code == "shapes_differ"


def test_an_arm_executed_by_another_launcher_is_wrong():
    outcome = rule(make_outcome(launcher="interpreter")).outcome
    assert (outcome.status, outcome.reason_code) == ("wrong", "launcher_differs")
    static = rule(make_outcome(launcher="native"), arm=STATIC).outcome
    assert (static.status, static.reason_code) == ("wrong", "launcher_differs")


@pytest.mark.parametrize(
    ("share", "status"), [(None, "wrong"), (0.0, "wrong"), (0.49, "wrong"), (0.5, "passed"), (1.0, "passed")]
)
@pytest.mark.parametrize("static", ["passed", "crashed"])
def test_a_unified_run_that_moved_too_little_is_void(share, status, static):
    metrics = {name: m for name, m in make_outcome().metrics.items() if name != "moved_share"}
    if share is not None:
        metrics["moved_share"] = Metric(value=share, unit="share", n=40)
    other = make_outcome() if static == "passed" else Outcome(status="crashed", reason="SIGSEGV")
    outcome = rule(make_outcome(metrics=metrics), static=other).outcome
    assert outcome.status == status
    assert outcome.reason_code == ("identity_map" if status == "wrong" else None)
    assert ("max_logit_diff" in outcome.metrics) == (static == "passed")


def test_the_static_arm_needs_no_moved_pages():
    metrics = {"accuracy": Metric(value=1.0, unit="share", n=3)}
    assert rule(make_outcome(metrics=metrics), arm=STATIC).outcome.status == "passed"


@pytest.mark.parametrize("status", ["wrong", "refused", "crashed", "timed_out", "skipped"])
def test_beside_a_static_arm_that_did_not_pass_an_arm_keeps_its_status(status):
    static = without_timings(make_outcome(status=status, reason="why"))
    ruling = rule(make_outcome(), static=static)
    assert ruling.outcome.status == "passed"
    assert ruling.exactness is None
    assert "max_logit_diff" not in ruling.outcome.metrics


@pytest.mark.parametrize("status", ["refused", "crashed", "timed_out", "skipped"])
def test_an_arm_that_did_not_answer_is_left_as_it_is(status):
    outcome = Outcome(status=status, reason_code="code", reason="why")
    assert rule(outcome).outcome == outcome


def test_a_wrong_arm_keeps_its_first_code_and_gets_its_distance():
    outcome = without_timings(changed("logits", (0, 0), 50.0))
    outcome = replace(outcome, status="wrong", reason_code="accuracy", reason="accuracy 0.1 below 0.97")
    ruled = rule(outcome).outcome
    assert ruled.reason_code == "accuracy"
    assert "below 0.97" in ruled.reason
    assert "largest logit difference" in ruled.reason
    assert ruled.metrics["max_logit_diff"].value > 40
