"""The gate's own smoke set: it plants faults into made-up results that its policy must pass, and must see each.

A gate that can never fire looks just like one that has nothing to report. So before it decides, the very
code and policy that decide are shown a clean cell of every rule, which must pass, and the same cell with
one fault after another, none of which may. Faults that a matrix planted into the engine at the revision that is
judged come with the inputs, and each of their rows must have ended as `wrong`.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from msgspec.structs import replace

from db.gate_inputs import CellRows, Exact, Inputs, Row
from suite.e2e.gate import policy
from suite.e2e.gate.decide import judge, overall
from suite.e2e.gate.policy import CellRule, Policy
from suite.e2e.gate.statistics import SEED
from suite.e2e.gate.synthetic import clean_inputs
from suite.e2e.gate.verdicts import Smoke
from suite.records import metric_kind

Harm = Callable[[Row], Row]
SLOWDOWN = 4.0  # margins


def smoke_set(rules: Policy, inputs: Inputs) -> Smoke:
    """Plant every fault, and say which were missed."""
    planted, missed = 0, []
    for number, rule in enumerate(rules.cells):
        random = np.random.default_rng(SEED)
        clean = clean_inputs(rules, rule, random)
        if verdict_of(rules, rule, clean) != "PASS":
            missed.append(f"cells[{number}]: a clean cell does not pass")
        for endpoint, fault, faulty, must in faults(rules, rule, clean):
            planted += 1
            if verdict_of(rules, replace(rule, endpoints=(endpoint,)), faulty) not in must:
                missed.append(f"cells[{number}] {endpoint}: {fault}")
    for row in inputs.planted:
        planted += 1
        if row.status != "wrong":
            missed.append(f"{row.fault} ended as {row.status} in run {row.run}")
    return Smoke(planted=planted, missed=tuple(missed))


def verdict_of(rules: Policy, rule: CellRule, inputs: Inputs) -> str:
    """The verdict on `inputs` under this rule alone."""
    alone = replace(rules, cells=(replace(rule, min_cells=1),), devices=())
    judged = judge(alone, inputs)
    candidates = [cell for cell in judged.cells if not cell.control]
    return overall(alone, inputs, judged, candidates)[0] if candidates else "no cell"


def faults(rules: Policy, rule: CellRule, clean: Inputs) -> Iterator[tuple[str, str, Inputs, tuple[str, ...]]]:
    """Every fault that must be seen: by which endpoint, its name, the inputs with it, the verdicts that see it."""
    red, unsure = ("FAIL",), ("FAIL", "INCONCLUSIVE")
    for name in rule.endpoints:
        endpoint = rules.endpoints[name]
        if isinstance(endpoint, policy.History):
            yield name, "a step", with_step(clean, endpoint), red
            continue
        for fault, harm in HARMS[type(endpoint)](endpoint):
            yield name, fault, harmed(clean, harm), red
        if isinstance(endpoint, policy.Latency):
            for value in (0.0, None, "nan", "inf"):
                yield name, f"{value} for a time", harmed(clean, set_value(endpoint.metric, value)), unsure
            yield name, "no time", harmed(clean, lambda row: replace(row, values={})), unsure
    claim = next(name for name in rule.endpoints if isinstance(rules.endpoints[name], policy.CLAIMS))
    yield claim, "a missing row", without_row(clean), unsure
    yield claim, "other prompts", harmed(clean, lambda row: replace(row, prompt_hash="others")), unsure
    yield claim, "another launcher", harmed(clean, lambda row: replace(row, launcher="another")), unsure
    yield claim, "a wrong answer", harmed(clean, wrong), red


def harmed(inputs: Inputs, harm: Harm) -> Inputs:
    """`inputs` with every row of the candidate harmed."""

    def harm_cell(cell: CellRows) -> CellRows:
        *others, candidate = cell.arms
        return replace(cell, arms=(*others, replace(candidate, rows=tuple(harm(row) for row in candidate.rows))))

    return replace(inputs, cells=tuple(harm_cell(cell) for cell in inputs.cells))


def without_row(inputs: Inputs) -> Inputs:
    cell = inputs.cells[0]
    *others, candidate = cell.arms
    return replace(inputs, cells=(replace(cell, arms=(*others, replace(candidate, rows=candidate.rows[1:]))),))


def with_step(inputs: Inputs, endpoint: policy.History) -> Inputs:
    """The candidate's last nights, half a window at most, at thirty taus above the others."""
    recent = max(3, min(endpoint.recent, endpoint.window // 2))

    def step(cell: CellRows) -> CellRows:
        candidate = cell.arms[-1].id
        rise = np.r_[np.zeros(endpoint.window - recent), np.full(recent, 0.03)]
        series = tuple(
            replace(s, values=tuple((np.array(s.values) + rise).tolist()))
            if s.arm == candidate and s.metric == endpoint.metric
            else s
            for s in cell.series
        )
        return replace(cell, series=series)

    return replace(inputs, cells=tuple(step(cell) for cell in inputs.cells))


def set_value(metric: str, value: Any) -> Harm:
    return lambda row: replace(row, values={**row.values, metric: value})


def wrong(row: Row) -> Row:
    return replace(row, status="wrong", reason_code="logits_differ", reason="planted")


def slow(endpoint: policy.Latency) -> Iterator[tuple[str, Harm]]:
    sign = 1.0 if metric_kind(endpoint.metric).better == "lower" else -1.0
    factor = math.exp(sign * SLOWDOWN * math.log1p(endpoint.margin))
    yield (
        f"{SLOWDOWN:g} margins slower",
        lambda row: set_value(endpoint.metric, row.values[endpoint.metric] * factor)(row),
    )  # type: ignore[operator]


def inexact(endpoint: policy.Exact) -> Iterator[tuple[str, Harm]]:
    off = (Exact(metric="max_logit_diff", effect=1e-6, verdict="differs"),)
    yield "one logit off by 1e-6", lambda row: replace(row, exact=off)


def lossy(endpoint: policy.Accuracy) -> Iterator[tuple[str, Harm]]:
    def lose(row: Row) -> Row:
        count = math.ceil(SLOWDOWN * endpoint.margin * len(row.answers[0]))
        return replace(row, answers=(row.answers[0].replace("1", "0", count),))

    yield f"{SLOWDOWN:g} margins of answers lost", lose


def flipped(endpoint: policy.Flips) -> Iterator[tuple[str, Harm]]:
    def flip(row: Row) -> Row:
        swap = {"1": "0", "0": "1"}
        half = [swap[c] if number % 2 else c for number, c in enumerate(row.answers[0])]
        return replace(row, answers=("".join(half),))

    yield "half of the answers flipped", flip


def misled(endpoint: policy.Accept) -> Iterator[tuple[str, Harm]]:
    yield (
        "a draft that is never believed",
        lambda row: replace(row, counters={**row.counters, "verify_passes": row.counters["accept_tokens"]}),
    )


def disbelieved(endpoint: policy.Positions) -> Iterator[tuple[str, Harm]]:
    def disbelieve(row: Row) -> Row:
        fewer = [[*counts[:-1], int(counts[-1] * 0.5)] for counts in row.counters["accepted_at"]]  # type: ignore[index,operator,union-attr]
        return replace(row, counters={**row.counters, "accepted_at": fewer})

    yield "the last position half as often believed", disbelieve


HARMS: Mapping[type, Callable[[Any], Iterator[tuple[str, Harm]]]] = {
    policy.Exact: inexact,
    policy.Accuracy: lossy,
    policy.Flips: flipped,
    policy.Latency: slow,
    policy.Accept: misled,
    policy.Positions: disbelieved,
}
