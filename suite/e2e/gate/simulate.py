"""Campaigns to draw: each function makes a simulation of one endpoint, which asks the deciding code about drawn rows.

An effect of 0 is an A/A campaign. Whatever is drawn goes through the very functions that judge real rows.
"""

import math
from collections.abc import Callable

import msgspec
import numpy as np

from db.gate_inputs import ArmRows, CellRows
from suite.e2e.gate import draft, endpoints, history, latency, policy, trend
from suite.e2e.gate.decide import judge, overall
from suite.e2e.gate.pairs import Pair
from suite.e2e.gate.policy import Policy
from suite.e2e.gate.synthetic import blank_row, clean_inputs, series_of_values
from suite.e2e.gate.verdicts import Evidence, make_evidence

Simulate = Callable[[np.random.Generator, float], Evidence]
ALPHA = 0.05
RULES = Policy(
    name="campaign",
    alpha=ALPHA,
    fdr=ALPHA,
    power=0.8,
    baseline="static",
    candidates=("unified",),
    launchers=("native",),
    smoke="not_required",
    rows=policy.Rows(refused="ignore", crashed="fail", timed_out="fail", skipped="no_data"),
    endpoints={},
    cells=(),
)


def latency_at(tau: float, margin: float, looks: tuple[int, ...], heavy: bool = False) -> Simulate:
    """Blocks of log ratios with SD `tau`, normal or with the tails of a t of 5 degrees of freedom."""
    endpoint = policy.Latency(metric="itl_ms", margin=margin, looks=looks, fail_when="beyond_margin")

    def simulate(random: np.random.Generator, effect: float) -> Evidence:
        noise = random.standard_t(5, looks[-1]) / math.sqrt(5 / 3) if heavy else random.normal(size=looks[-1])
        ratios = math.log1p(effect) + tau * noise
        spread = lambda look: latency.sample_spread(ratios[:look])  # noqa: E731
        return endpoints.latency_evidence("latency", endpoint, RULES, ratios, spread)

    return simulate


def answers(random: np.random.Generator, n: int, discordance: float, loss: float) -> tuple[str, str]:
    """Two arms' answers to n questions, of which a share flips and `loss` more is lost than won."""
    static = random.random(n) < 0.8
    lost, won = (discordance + loss) / 2 / 0.8, (discordance - loss) / 2 / 0.2
    flip = random.random(n) < np.where(static, lost, won)
    return text(static), text(static ^ flip)


def text(right: np.ndarray) -> str:
    return "".join("1" if r else "0" for r in right)


def accuracy_at(n: int, discordance: float, margin: float) -> Simulate:
    endpoint = policy.Accuracy(margin=margin, min_items=n, fail_when="worse_than_zero")
    tasks = ["task"] * n

    def simulate(random: np.random.Generator, effect: float) -> Evidence:
        a, b = answers(random, n, max(discordance, effect), effect)
        pair = Pair(blank_row(answers=(a,)), blank_row(answers=(b,)))
        return endpoints.accuracy_evidence("accuracy", endpoint, RULES, [pair], [], tasks)

    return simulate


def flips_at(n: int, discordance: float) -> Simulate:
    """The candidate flips `effect` more of the answers than the replicate does, in both directions alike."""
    endpoint = policy.Flips(psi0="replicate")

    def simulate(random: np.random.Generator, effect: float) -> Evidence:
        static = random.random(n) < 0.8
        rows = [
            blank_row(answers=(text(static ^ (random.random(n) < rate)),))
            for rate in (discordance + effect, discordance)
        ]
        base = blank_row(answers=(text(static),))
        pairs, control = [Pair(base, rows[0])], [Pair(base, rows[1])]
        return endpoints.flips_evidence("flips", endpoint, ALPHA, pairs, control, ["task"] * n)

    return simulate


def accept_at(prompts: int, noise: float, margin: float) -> Simulate:
    """256 tokens a prompt at an accept length of 2.3, which differs between the arms by `noise` in each prompt."""
    endpoint = policy.Accept(margin=margin, min_prompts=prompts, floor=1.05, fail_when="beyond_margin")

    def simulate(random: np.random.Generator, effect: float) -> Evidence:
        length = random.normal(2.3, 0.3, prompts)
        arms = [
            np.maximum(length / (1.0 + loss) + random.normal(0.0, noise / math.sqrt(2), prompts), 1.0)
            for loss in (0.0, effect)
        ]
        tokens = [256.0] * prompts
        rows = [blank_row(counters={"accept_tokens": tokens, "verify_passes": (256.0 / arm).tolist()}) for arm in arms]
        return draft.accept_evidence("accept", endpoint, RULES, [Pair(*rows)])

    return simulate


def positions_at(prompts: int, proposed: int) -> Simulate:
    """Four positions; at the last of them the candidate is believed less often by `effect`."""

    def simulate(random: np.random.Generator, effect: float) -> Evidence:
        believed = np.array([0.85, 0.75, 0.65, 0.55]) + random.normal(0.0, 0.05, (prompts, 1))
        counts = np.full((prompts, 4), proposed)
        rows = [
            blank_row(
                counters={
                    "accepted_at": random.binomial(counts, np.clip(believed - loss, 0.0, 1.0)).tolist(),
                    "proposed_at": counts.tolist(),
                }
            )
            for loss in (np.zeros(4), np.array([0.0, 0.0, 0.0, effect]))
        ]
        return draft.positions_evidence("positions", ALPHA, [Pair(*rows)])

    return simulate


def step_at(nights: int) -> Simulate:
    """A nightly series of SD 1 that steps up by `effect` seven nights before its end."""
    endpoint = policy.History(metric="itl_ms", alpha=0.005, min_nights=14, window=nights, recent=7)

    def simulate(random: np.random.Generator, effect: float) -> Evidence:
        values = random.normal(size=nights) + np.r_[np.zeros(nights - 7), np.full(7, effect)]
        return trend.history_evidence("step", endpoint, "cell", series_of_values(values), None)[0]

    return simulate


def creep_at(nights: int) -> Simulate:
    """A year against a release that was pinned from one night; it creeps up to `effect` by the end."""

    def simulate(random: np.random.Generator, effect: float) -> Evidence:
        values = random.normal(size=nights) + np.linspace(0.0, effect, nights)
        night = history.creep(values, float(random.normal()), trend.night_to_night_tau(values))
        return make_evidence("creep", "history", "QUIET" if night is None else "FAIL", "", nights)

    return simulate


def whole_at(cells: int) -> Simulate:
    """A whole run of `cells` cells through `judge`: exact, accuracy, flips and latency; one of them slows down."""
    rules = msgspec.structs.replace(RULES, endpoints=WHOLE, cells=(WHOLE_RULE,))

    def simulate(random: np.random.Generator, effect: float) -> Evidence:
        drawn = [noisy_cell(rules, random, effect if number == 0 else 0.0, number) for number in range(cells)]
        inputs = msgspec.structs.replace(clean_inputs(rules, WHOLE_RULE, random), cells=tuple(drawn))
        judged = judge(rules, inputs)
        verdict, _, reason = overall(rules, inputs, judged, [cell for cell in judged.cells if not cell.control])
        return make_evidence("run", "run", verdict, reason)

    return simulate


WHOLE: dict[str, policy.Endpoint] = {
    "exact": policy.Exact(),
    "accuracy": policy.Accuracy(margin=0.05, min_items=400, fail_when="worse_than_zero"),
    "flips": policy.Flips(psi0="replicate"),
    "itl": policy.Latency(metric="itl_ms", margin=0.02, looks=(8,), fail_when="beyond_margin"),
}
WHOLE_RULE = policy.CellRule(select={"family": ["engine"]}, endpoints=tuple(WHOLE), min_cells=1)


def noisy_cell(rules: Policy, random: np.random.Generator, effect: float, number: int) -> CellRows:
    """A synthetic cell whose blocks have a tau of 0.7 % and whose answers flip 4 % of the time in every arm."""
    cell = clean_inputs(rules, WHOLE_RULE, random).cells[0]

    def noisy(arm: ArmRows) -> ArmRows:
        right = np.array([c == "1" for c in arm.rows[0].answers[0]])
        answers = (text(right ^ (random.random(right.size) < 0.04)),)
        slow = 1.0 + effect * (arm.pool == "unified")
        rows = tuple(
            msgspec.structs.replace(
                row, answers=answers, values={"itl_ms": slow * math.exp(random.normal(0.0, 0.007 / math.sqrt(2)))}
            )
            for row in arm.rows
        )
        return msgspec.structs.replace(arm, rows=rows)

    return msgspec.structs.replace(cell, id=f"cell {number}", arms=tuple(noisy(arm) for arm in cell.arms))
