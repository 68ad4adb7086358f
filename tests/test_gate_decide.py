"""Decisions over made-up inputs: what passes, what fails, what nobody can tell, and what is refused."""

import numpy as np
import pytest
from msgspec.structs import replace

from db.gate_inputs import Exact
from suite.e2e.gate.decide import decide
from suite.e2e.gate.smoke import harmed
from suite.e2e.gate.synthetic import clean_inputs
from suite.e2e.gate.verdicts import GateRefusedError, Smoke
from tests.gate_rig import make_policy, policy_table

POLICY = make_policy()


def clean(policy=POLICY, seed=0):
    return clean_inputs(policy, policy.cells[0], np.random.default_rng(seed))


def no_smoke(policy, inputs):
    return Smoke(planted=0, missed=())


def say(inputs, policy=POLICY):
    return decide(policy, inputs, no_smoke)


def of(decision, endpoint, control=False):
    """The evidence of one endpoint."""
    cell = next(c for c in decision.cells if c.control == control)
    return next(e for e in cell.evidence if e.endpoint == endpoint)


def harm(**changes):
    return harmed(clean(), lambda row: replace(row, **changes))


def slowed(factor, inputs=None):
    return harmed(inputs or clean(), lambda row: replace(row, values={"itl_ms": row.values["itl_ms"] * factor}))


def change_arm(inputs, index, harm):
    cell = inputs.cells[0]
    arms = tuple(
        replace(arm, rows=tuple(harm(row) for row in arm.rows)) if n == index else arm
        for n, arm in enumerate(cell.arms)
    )
    return replace(inputs, cells=(replace(cell, arms=arms),))


def test_a_clean_cell_passes_with_all_its_evidence():
    decision = say(clean())
    assert (decision.verdict, decision.exit_code) == ("PASS", 0)
    assert [e.verdict for e in decision.cells[-1].evidence] == ["PASS", "PASS", "QUIET", "PASS"]
    itl = of(decision, "itl")
    assert itl.lo < itl.effect < itl.hi < itl.margin == 0.02 or itl.hi < np.log1p(itl.margin)
    assert itl.power > 0.99
    assert decision == say(clean())


def test_a_slowdown_fails_and_says_by_how_much():
    decision = say(slowed(1.06))
    assert (decision.verdict, decision.exit_code) == ("FAIL", 1)
    assert of(decision, "itl").effect == pytest.approx(np.log(1.06), abs=0.003)
    assert "itl_ms +5.95%" in decision.reason


def test_a_slowdown_at_the_margin_is_neither():
    decision = say(slowed(1.02, clean(seed=2)))
    assert (decision.verdict, decision.exit_code) == ("INCONCLUSIVE", 2)


def test_a_speedup_passes():
    assert say(slowed(0.9)).verdict == "PASS"


@pytest.mark.parametrize(
    ("values", "said"),
    [({"itl_ms": None}, "is null"), ({"itl_ms": "nan"}, "is nan"), ({"itl_ms": "inf"}, "is inf"), ({}, "is missing"),
     ({"itl_ms": 0.0}, "is 0"), ({"itl_ms": -1.0}, "is -1")],
)  # fmt: skip
def test_what_is_no_number_has_its_name_and_never_passes(values, said):
    decision = say(harm(values=values))
    assert (decision.verdict, decision.exit_code) == ("INCONCLUSIVE", 3)
    assert said in of(decision, "itl").reason
    assert of(decision, "itl").no_data


def test_times_that_never_vary_are_no_times():
    decision = say(change_arm(harm(values={"itl_ms": 3.0}), 0, lambda row: replace(row, values={"itl_ms": 3.0})))
    assert decision.exit_code == 3
    assert "very same ratio" in of(decision, "itl").reason


def test_too_few_blocks_say_how_many_are_needed():
    inputs = clean()
    cell = inputs.cells[0]
    arms = tuple(replace(arm, rows=arm.rows[:5], planned=arm.planned[:5]) for arm in cell.arms)
    decision = say(replace(inputs, cells=(replace(cell, arms=arms),)))
    assert decision.exit_code == 2
    assert of(decision, "itl").needed == 8


def test_low_power_is_inconclusive_and_says_what_it_takes():
    noisy = np.random.default_rng(3)
    inputs = harmed(clean(), lambda row: replace(row, values={"itl_ms": 3.0 * float(np.exp(noisy.normal(0, 0.03)))}))
    found = of(say(inputs), "itl")
    assert found.verdict == "INCONCLUSIVE"
    assert found.power < 0.8
    assert found.needed > 8
    assert f"{found.needed} blocks are needed" in found.reason


def test_lost_answers_fail_and_few_questions_cannot_pass():
    def lose(row):
        return replace(row, answers=(row.answers[0].replace("1", "0", 30),))

    decision = say(harmed(clean(), lose))
    assert of(decision, "accuracy").verdict == "FAIL"
    assert of(decision, "flips").verdict == "FAIL"
    few = replace(
        POLICY, endpoints=POLICY.endpoints | {"accuracy": replace(POLICY.endpoints["accuracy"], min_items=9999)}
    )
    assert of(say(clean(), few), "accuracy").verdict == "INCONCLUSIVE"


def test_answers_that_change_without_being_lost_raise_the_alarm():
    def swap(row):
        ones = [n for n, c in enumerate(row.answers[0]) if c == "1"][:12]
        zeros = [n for n, c in enumerate(row.answers[0]) if c == "0"][:12]
        flip = {*ones, *zeros}
        return replace(
            row, answers=("".join({"0": "1", "1": "0"}[c] if n in flip else c for n, c in enumerate(row.answers[0])),)
        )

    decision = say(harmed(clean(), swap))
    assert of(decision, "accuracy").effect == 0.0
    assert of(decision, "flips").verdict == "FAIL"


def test_other_questions_are_no_data():
    decision = say(harmed(clean(), lambda row: replace(row, answers=("-" + row.answers[0][1:],))))
    assert "different questions" in of(decision, "accuracy").reason
    assert decision.exit_code == 3


def test_repeats_that_differ_are_clustered_by_question():
    random = np.random.default_rng(4)

    def shake(row):
        right = np.array([c == "1" for c in row.answers[0]]) ^ (random.random(len(row.answers[0])) < 0.05)
        return replace(row, answers=("".join("1" if r else "0" for r in right),))

    inputs = clean()
    for arm in range(3):
        inputs = change_arm(inputs, arm, shake)
    found = of(say(inputs), "accuracy")
    assert "asked 8 times" in found.reason
    assert found.verdict == "PASS"


@pytest.mark.parametrize("effect", [1e-9, None, "nan"])
def test_exactness_is_zero_or_nothing(effect):
    off = (Exact(metric="max_logit_diff", effect=effect, verdict="differs"),)
    assert of(say(harm(exact=off)), "exact").verdict == "FAIL"


def test_no_comparison_is_no_exactness():
    decision = say(harm(exact=()))
    assert decision.exit_code == 3
    assert of(decision, "exact").no_data


def test_exactness_says_nothing_where_the_replicate_differs_too():
    off = (Exact(metric="max_logit_diff", effect=0.5, verdict="differs"),)
    inputs = change_arm(harm(exact=off), 1, lambda row: replace(row, exact=off))
    assert of(say(inputs), "exact").verdict == "INCONCLUSIVE"


def test_a_regression_of_the_replicate_excuses_the_candidate():
    inputs = slowed(1.06)
    inputs = change_arm(inputs, 1, lambda row: replace(row, values={"itl_ms": row.values["itl_ms"] * 1.06}))
    decision = say(inputs)
    assert of(decision, "itl", control=True).verdict == "FAIL"
    assert of(decision, "itl").verdict == "INCONCLUSIVE"
    assert "replicate fails it too" in of(decision, "itl").reason
    assert decision.exit_code == 2


@pytest.mark.parametrize(
    ("changes", "exit_code", "said"),
    [
        ({"launcher": "native"}, 3, "launcher is reference in the static arm and native"),
        ({"launcher": None}, 3, "launcher"),
        ({"prompt_hash": "others"}, 3, "prompt_hash is prompts in the static arm and others"),
        ({"comparable_hash": "elsewhere"}, 3, "comparable_hash"),
        ({"void_reason": "throttled"}, 3, "no guard objected"),
        ({"status": "wrong", "reason_code": "logits_differ", "reason": "x"}, 1, "logits_differ"),
        ({"status": "wrong", "reason_code": "identity_map", "reason": "x"}, 3, "identity_map"),
        ({"status": "crashed", "reason": "signal 9"}, 1, "crashed in block 0"),
        ({"status": "timed_out", "reason": "x"}, 1, "timed_out"),
        ({"status": "skipped", "reason": "budget"}, 2, "skipped"),
    ],
)
def test_rows_that_may_not_be_compared(changes, exit_code, said):
    decision = say(harm(**changes))
    assert decision.exit_code == exit_code
    assert decision.verdict != "PASS"
    assert said in decision.reason


def test_a_crash_of_both_arms_is_nobodys_regression():
    inputs = harm(status="crashed", reason="x")
    decision = say(change_arm(inputs, 0, lambda row: replace(row, status="crashed", reason="x")))
    assert decision.exit_code == 3


def test_one_wrong_block_of_eight_fails():
    inputs = clean()
    decision = say(
        harmed(
            inputs,
            lambda row: replace(row, status="wrong", reason_code="tokens", reason="x") if row.block == 5 else row,
        )
    )
    assert decision.exit_code == 1


def test_a_launcher_that_the_policy_does_not_name_is_no_data():
    decision = say(clean(), replace(POLICY, launchers=("native",)))
    assert decision.exit_code == 3
    assert "the policy needs native" in decision.reason


def test_another_device_is_no_data():
    decision = say(clean(), replace(POLICY, devices=("NVIDIA H200",)))
    assert decision.exit_code == 3
    assert "ran on a device, the policy needs NVIDIA H200" in decision.reason


def test_missing_rows_are_no_data():
    inputs = clean()
    cell = inputs.cells[0]
    candidate = replace(cell.arms[2], rows=cell.arms[2].rows[:-1])
    decision = say(replace(inputs, cells=(replace(cell, arms=(*cell.arms[:2], candidate)),)))
    assert decision.exit_code == 3
    assert "1 of 8 planned unified rows are missing" in decision.reason


def test_refused_cells_are_left_out_and_do_not_pass():
    inputs = harm(status="refused", reason="needs sm_100")
    with pytest.raises(GateRefusedError, match="could be judged"):
        say(inputs)
    both = replace(inputs, cells=(*inputs.cells, replace(clean().cells[0], id="another")))
    decision = say(both)
    assert decision.verdict == "PASS"
    assert len(decision.left_out) == 1
    assert "needs sm_100" in decision.left_out[0]
    two = make_policy(cells=[{**policy_table()["cells"][0], "min_cells": 2}])
    assert say(both, two).exit_code == 3


def test_cells_that_no_rule_names_are_said_to_be_unjudged():
    inputs = clean()
    other = replace(inputs.cells[0], id="kernel", name="a kernel", fields=inputs.cells[0].fields | {"family": "kernel"})
    decision = say(replace(inputs, cells=(*inputs.cells, other)))
    assert decision.unjudged == ("a kernel",)
    with pytest.raises(GateRefusedError, match="could be judged"):
        say(replace(inputs, cells=(other,)))


def test_a_regression_among_many_tests_needs_a_small_q():
    inputs = clean()
    lost = "1" * 20 + inputs.cells[0].arms[0].rows[0].answers[0][20:]
    base = inputs
    for arm in range(3):
        base = change_arm(base, arm, lambda row: replace(row, answers=(lost,)))
    # 7 answers of 400 are lost and 1 is won: p = 0.035 of one test, nothing among a hundred
    worse = "0" * 7 + lost[7:]
    at = worse.index("0", 30)
    worse = worse[:at] + "1" + worse[at + 1 :]
    one = harmed(base, lambda row: replace(row, answers=(worse,)))
    tight = replace(
        POLICY, endpoints=POLICY.endpoints | {"accuracy": replace(POLICY.endpoints["accuracy"], margin=0.01)}
    )
    tight = replace(tight, cells=(replace(tight.cells[0], endpoints=("exact", "accuracy")),))
    assert say(one, tight).verdict == "FAIL"
    many = (*one.cells, *(replace(base.cells[0], id=f"cell {n}") for n in range(99)))
    decision = say(replace(one, cells=many), tight)
    assert decision.verdict == "INCONCLUSIVE"
    assert "over 100 tests q is" in of(decision, "accuracy").reason
