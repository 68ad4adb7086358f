"""Judging cells one by one: the rule that fits, the pairs that may be compared, the evidence of every endpoint."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from db.gate_inputs import ArmRows, CellRows, Inputs, Series
from suite.e2e.gate import draft, endpoints, latency, policy
from suite.e2e.gate.pairs import NoNumberError, Pairing, pair_rows
from suite.e2e.gate.policy import CellRule, Policy
from suite.e2e.gate.trend import history_evidence
from suite.e2e.gate.verdicts import CellDecision, Evidence, Noise, StepFound, lacking, make_evidence

REPLICATE = "replicate"


class Case(NamedTuple):
    """One arm of one cell that is to be judged."""

    rule: CellRule
    number: int
    cell: CellRows
    arm: ArmRows
    pairing: Pairing

    @property
    def control(self) -> bool:
        return self.arm.label == REPLICATE


class Judged(NamedTuple):
    """Every arm judged, before anything is corrected for many tests."""

    cells: list[CellDecision]
    left_out: list[str]
    unjudged: list[str]
    by_rule: list[int]
    noise: list[Noise]
    steps: list[StepFound]


def judge_cells(rules: Policy, inputs: Inputs) -> Judged:
    """The evidence of every cell that the policy names; its rows' own findings are its verdict so far."""
    judged = Judged([], [], [], [0] * len(rules.cells), [], [])
    cases = list(find_cases(rules, inputs, judged))
    controls = {case.cell.id: case.pairing for case in cases if case.control}
    spreads = FamilySpreads(cases, rules)
    for case in cases:
        pairing = case.pairing
        if not pairing.pairs and not pairing.findings and not pairing.void:
            judged.left_out.append(
                f"{case.cell.name} {case.arm.name}: {pairing.ignored[0] if pairing.ignored else 'no rows'}"
            )
            continue
        found = [
            judge_endpoint(rules, name, case, controls.get(case.cell.id), spreads, judged)
            for name in case.rule.endpoints
        ]
        judged.cells.append(cell_decision(case, tuple(found)))
        judged.by_rule[case.number] += not case.control
    judged.noise.extend(noise_of(cases, rules))
    return judged


def find_cases(rules: Policy, inputs: Inputs, judged: Judged) -> Iterator[Case]:
    """The arms to judge, each with the first rule that fits its cell."""
    for cell in inputs.cells:
        fit = next(((n, rule) for n, rule in enumerate(rules.cells) if rule.fits(cell.fields)), None)
        if fit is None:
            judged.unjudged.append(cell.name)
            continue
        for arm in cell.arms:
            candidate = arm.pool in rules.candidates and arm.label is None
            if candidate or (arm.pool == rules.baseline and arm.label == REPLICATE):
                pairing = pair_rows(rules, cell, arm, inputs.runs)
                yield Case(fit[1], fit[0], cell, arm, pairing)


def cell_decision(case: Case, found: tuple[Evidence, ...]) -> CellDecision:
    """What the rows alone say of the cell: the worst finding, or nothing against it yet."""
    worst = {finding.meaning: finding.reason for finding in reversed(case.pairing.findings)}
    meaning = next((m for m in ("fail", "no_data", "inconclusive") if m in worst), None)
    return CellDecision(
        cell_id=case.cell.id,
        cell=case.cell.name,
        arm_id=case.arm.id,
        arm=case.arm.name,
        control=case.control,
        verdict="FAIL" if meaning == "fail" else "INCONCLUSIVE",
        no_data=meaning == "no_data",
        reason=worst[meaning] if meaning else "",
        blocks=len(case.pairing.pairs),
        void_blocks=case.pairing.void,
        evidence=found,
    )


class FamilySpreads:
    """The spread of each cell's log ratios, shrunk towards those of its family: every arm lends its blocks."""

    def __init__(self, cases: Sequence[Case], rules: Policy) -> None:
        self.ratios: dict[tuple[str, str, str], tuple[str, np.ndarray]] = {}
        for case in cases:
            for name in case.rule.endpoints:
                endpoint = rules.endpoints[name]
                if isinstance(endpoint, policy.Latency):
                    try:
                        ratios = endpoints.block_ratios(case.pairing.pairs, endpoint.metric)
                    except NoNumberError:
                        continue  # its own evidence says so
                    self.ratios[name, case.cell.id, case.arm.id] = (case.cell.family, ratios)
        self.shrunk: dict[tuple[str, str, int], dict[tuple[str, str, str], latency.Spread]] = {}

    def at(self, key: tuple[str, str, str], look: int) -> latency.Spread:
        """The spread of `key` (endpoint, cell, arm) over its first `look` blocks."""
        name, family = key[0], self.ratios[key][0]
        if (name, family, look) not in self.shrunk:
            members = {
                k: latency.sample_spread(ratios[:look])
                for k, (f, ratios) in self.ratios.items()
                if k[0] == name and f == family and ratios.size >= look and np.ptp(ratios[:look])
            }
            shrunk = latency.shrink_spreads(list(members.values()))
            self.shrunk[name, family, look] = dict(zip(members, shrunk, strict=True))
        return self.shrunk[name, family, look][key]


def judge_endpoint(
    rules: Policy, name: str, case: Case, control: Pairing | None, spreads: FamilySpreads, judged: Judged
) -> Evidence:
    """One endpoint's evidence; a value that is no number is no data, by its name."""
    endpoint, pairs = rules.endpoints[name], case.pairing.pairs
    kind = endpoint.__struct_config__.tag
    if isinstance(endpoint, policy.History):
        series, other = (series_of(case, endpoint.metric, own) for own in (True, False))
        found, steps = history_evidence(name, endpoint, case.cell.id, series, other)
        judged.steps.extend(steps)
        return found
    if not pairs and case.pairing.findings:
        return make_evidence(name, str(kind), "INCONCLUSIVE", case.pairing.findings[0].reason)  # the rows say it all
    if not pairs:
        return lacking(name, str(kind), "no block in which both arms passed and no guard objected")
    replicas = control.pairs if control is not None and not case.control else []
    try:
        if isinstance(endpoint, policy.Exact):
            return endpoints.exact_evidence(name, pairs, replicas)
        if isinstance(endpoint, policy.Accuracy):
            return endpoints.accuracy_evidence(name, endpoint, rules, pairs, replicas, case.cell.tasks)
        if isinstance(endpoint, policy.Flips):
            return flips(rules, name, endpoint, case, replicas)
        if isinstance(endpoint, policy.Accept):
            return draft.accept_evidence(name, endpoint, rules, pairs)
        if isinstance(endpoint, policy.Positions):
            return draft.positions_evidence(name, rules.alpha_of(endpoint), pairs)
        ratios = endpoints.block_ratios(pairs, endpoint.metric)
        key = (name, case.cell.id, case.arm.id)
        return endpoints.latency_evidence(name, endpoint, rules, ratios, lambda look: spreads.at(key, look))
    except NoNumberError as error:
        return lacking(name, str(kind), str(error), len(pairs))


def flips(rules: Policy, name: str, endpoint: policy.Flips, case: Case, replicas: list) -> Evidence:  # type: ignore[type-arg]
    """The flips of a candidate; a replicate has only itself to be held against."""
    if case.control and endpoint.psi0 == "replicate":
        replicas = case.pairing.pairs
    alpha = rules.alpha_of(endpoint)
    return endpoints.flips_evidence(name, endpoint, alpha, case.pairing.pairs, replicas, case.cell.tasks)


def series_of(case: Case, metric: str, own: bool) -> Series | None:
    """The nightly series of the case's own arm, or of the cell's replicate."""
    replicas = {arm.id for arm in case.cell.arms if arm.label == REPLICATE}
    wanted = {case.arm.id} if own else replicas - {case.arm.id}
    return next((s for s in case.cell.series if s.metric == metric and s.arm in wanted), None)


def noise_of(cases: Sequence[Case], rules: Policy) -> Iterator[Noise]:
    """What the A/A rows say of the noise: the pooled SD of each metric's log ratios, and psi0 of the answers."""
    metrics = sorted({e.metric for e in rules.endpoints.values() if isinstance(e, policy.Latency)})
    groups: dict[tuple[str, str, str], list[tuple[float, int]]] = {}
    for case in cases:
        pairs = case.pairing.pairs
        if not case.control or not pairs or pairs[0].static.comparable_hash is None:
            continue
        where = (case.cell.family, pairs[0].static.comparable_hash)
        for metric in metrics:
            try:
                ratios = endpoints.block_ratios(pairs, metric)
            except NoNumberError:
                continue  # the control's own evidence says so
            if ratios.size > 1:
                groups.setdefault((*where, metric), []).append((float(np.var(ratios, ddof=1)), ratios.size - 1))
        if case.cell.tasks and all(row.answers for pair in pairs for row in pair):
            rate = endpoints.replicate_rate(pairs, case.cell.tasks, ())
            if rate is not None:
                groups.setdefault((*where, "answers"), []).append((rate, len(case.cell.tasks)))
    for (family, environment, metric), found in sorted(groups.items()):
        n = sum(weight for _, weight in found)
        mean = math.fsum(value * weight for value, weight in found) / n
        spread = mean if metric == "answers" else math.sqrt(mean)
        yield Noise(family=family, comparable_hash=environment, metric=metric, spread=spread, n=n)
