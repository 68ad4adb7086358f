"""From paired rows to evidence: exactness, accuracy, flips and latency."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from suite.e2e.gate import accuracy, bootstrap, latency, policy
from suite.e2e.gate.pairs import NoNumberError, Pair, measured
from suite.e2e.gate.statistics import look_levels
from suite.e2e.gate.verdicts import Evidence, lacking, make_evidence
from suite.records import metric_kind

Spreads = Callable[[int], latency.Spread]  # blocks of a look -> this cell's shrunk spread


def exact_evidence(name: str, pairs: Sequence[Pair], control: Sequence[Pair]) -> Evidence:
    """E0: every comparison of every block is 0.0."""
    found = [exact for pair in pairs for exact in pair.candidate.exact]
    if not pairs or any(not pair.candidate.exact for pair in pairs):
        return lacking(
            name, "exact", "a block has no exactness comparison" if pairs else "no block to compare", len(pairs)
        )
    off = [exact for exact in found if exact.effect != 0.0 or exact.verdict != "equal"]
    numbers = [exact.effect for exact in found if isinstance(exact.effect, float | int)]
    effect = float(max(numbers)) if len(numbers) == len(found) else None
    if not off:
        reason = f"bit-identical in {len(pairs)} blocks"
        return make_evidence(name, "exact", "PASS", reason, len(pairs), effect=effect, margin=0.0)
    shown = "; ".join(f"{exact.metric} is {exact.effect}" for exact in off[:3])
    if any(exact.effect != 0.0 for pair in control for exact in pair.candidate.exact):
        reason = f"{shown}, but the static arm's replicate differs too: exactness says nothing here"
        return make_evidence(name, "exact", "INCONCLUSIVE", reason, len(pairs), effect=effect, margin=0.0)
    reason = f"{shown} in {len(off)} of {len(found)} comparisons, expected 0"
    return make_evidence(name, "exact", "FAIL", reason, len(pairs), effect=effect, margin=0.0)


def answers_of(rows: Sequence[str], tasks: Sequence[str], wanted: Sequence[str]) -> np.ndarray:
    """[repeats, items] of 1, 0 and NaN (not asked), over the items of the wanted tasks, all when none is wanted."""
    keep = np.array([not wanted or task in wanted for task in tasks], dtype=bool)
    values = {"1": 1.0, "0": 0.0, "-": math.nan}
    return np.array([[values[c] for c in row] for row in rows], dtype=float).reshape(len(rows), len(tasks))[:, keep]


def arm_answers(pairs: Sequence[Pair], tasks: Sequence[str], wanted: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Both arms' answers [repeats, items]; NoNumberError when they were not asked the same questions."""
    sides = [[text for pair in pairs for text in pair[side].answers] for side in (0, 1)]
    static, candidate = (answers_of(side, tasks, wanted) for side in sides)
    if static.shape != candidate.shape or not static.size:
        raise NoNumberError(f"{static.size} answers in the static arm and {candidate.size} in the candidate")
    if not np.array_equal(np.isnan(static), np.isnan(candidate)):
        raise NoNumberError("the arms were asked different questions")
    asked = ~np.isnan(static).any(axis=0)
    return static[:, asked], candidate[:, asked]


def accuracy_evidence(
    name: str, endpoint: policy.Accuracy, rules: policy.Policy, pairs: Sequence[Pair], control: Sequence[Pair],
    tasks: Sequence[str],
) -> Evidence:  # fmt: skip
    """E1: the loss is within the margin, by Tango's score, or by a cluster bootstrap where repeats differ."""
    alpha = rules.alpha_of(endpoint)
    static, candidate = arm_answers(pairs, tasks, endpoint.tasks)
    n = static.shape[1]
    if not n:
        return lacking(name, "accuracy", "no question was asked in both arms")
    same = all((side == side[0]).all() for side in (static, candidate))  # a deterministic engine repeats itself
    if same:
        flips = accuracy.count_flips(static[0] == 1.0, candidate[0] == 1.0)
        effect, discordance = flips.loss, flips.discordance
        within, beyond = accuracy.tango_p(flips, endpoint.margin)
        lo, hi = accuracy.tango_interval(flips, alpha)
        worse = accuracy.mcnemar_worse_p(flips)
        text = f"{flips.lost} lost and {flips.won} won of {n}"
    else:
        losses = (static - candidate).mean(axis=0)
        if not np.ptp(losses):
            return lacking(name, "accuracy", f"the loss is {losses[0]:g} in every question", n)
        found = bootstrap.cluster_bootstrap(losses[:, None], lambda sums: sums[..., 0] / n)
        effect, discordance = found.value, float(np.abs(static - candidate).mean())
        within, beyond, worse = found.p_within(endpoint.margin), found.p_beyond(endpoint.margin), found.p_beyond(0.0)
        lo, hi = found.bound(alpha), found.bound(1.0 - alpha)
        text = f"{n} questions asked {len(static)} times"
    noise = max(discordance, replicate_rate(control, tasks, endpoint.tasks) or 0.0)
    power = accuracy.tango_power(n, endpoint.margin, noise, alpha)
    needed = accuracy.needed_items(endpoint.margin, noise, alpha, rules.power)
    p_fail = worse if endpoint.fail_when == "worse_than_zero" else beyond
    facts = {"effect": effect, "lo": lo, "hi": hi, "p_within": within, "p_beyond": p_fail, "margin": endpoint.margin}
    enough = n >= endpoint.min_items and power >= rules.power
    needed = max(needed, endpoint.min_items) if needed is not None else None
    verdict, why = ruling(within, p_fail, alpha, enough, f"{n} questions have power {power:.2f}", needed, "questions")
    return make_evidence(
        name, "accuracy", verdict, f"{text}: {why}", n, **facts, level=alpha, power=power, needed=needed
    )


def ruling(
    within: float, beyond: float, level: float, enough: bool, power_text: str, needed: int | None, unit: str
) -> tuple[str, str]:
    """The verdict of a claim: a shown regression stands whatever the power, a pass needs it."""
    if within > level >= beyond:
        return "FAIL", f"a regression is shown, p {beyond:.2g}"
    if not enough:
        return "INCONCLUSIVE", f"{power_text}, {needed if needed is not None else 'too many'} {unit} are needed"
    if within <= level:
        return "PASS", f"within the margin, p {within:.2g}"
    return "INCONCLUSIVE", f"neither within the margin (p {within:.2g}) nor a regression (p {beyond:.2g})"


def replicate_rate(control: Sequence[Pair], tasks: Sequence[str], wanted: Sequence[str]) -> float | None:
    """psi0: the share of answers in which the static arm and its replicate disagree; None without a replicate."""
    if not control:
        return None
    static, replicate = arm_answers(control, tasks, wanted)
    return float(np.abs(static - replicate).mean()) if static.size else None


def flips_evidence(
    name: str, endpoint: policy.Flips, alpha: float, pairs: Sequence[Pair], control: Sequence[Pair],
    tasks: Sequence[str],
) -> Evidence:  # fmt: skip
    """Do answers change more often than the static arm's own do, even where as many are right?"""
    static, candidate = arm_answers(pairs, tasks, ())
    flips = accuracy.count_flips(static[0] == 1.0, candidate[0] == 1.0)
    if endpoint.psi0 != "replicate":
        p, known = accuracy.excess_rate_p(flips, float(endpoint.psi0)), float(endpoint.psi0)
    elif not control:
        return lacking(name, "flips", "no replicate of the static arm to learn psi0 from", flips.n)
    else:
        own, replicate = arm_answers(control, tasks, ())
        if own.shape[1] != flips.n:
            raise NoNumberError(f"{flips.n} questions against {own.shape[1]} in the replicate")
        p = accuracy.excess_flips_p(static[0] != candidate[0], own[0] != replicate[0])
        known = float((own[0] != replicate[0]).mean())
    reason = f"{flips.discordance:.2%} of {flips.n} answers changed, {known:.2%} do without a cause, p {p:.2g}"
    return make_evidence(
        name, "flips", "FAIL" if p <= alpha else "QUIET", reason, flips.n, effect=flips.discordance - known, p_beyond=p,
        level=alpha,
    )  # fmt: skip


def block_ratios(pairs: Sequence[Pair], metric: str) -> np.ndarray:
    """[blocks] of log ratios of `metric`, positive where the candidate is worse."""
    values = [measured((pair[side] for pair in pairs), metric) for side in (0, 1)]
    return latency.log_ratios(*values, metric_kind(metric).better)


def latency_evidence(
    name: str, endpoint: policy.Latency, rules: policy.Policy, ratios: np.ndarray, spread_at: Spreads
) -> Evidence:
    """E2: the first look that shows the cost within the margin, or beyond it; the last one taken when none does."""
    alpha, n = rules.alpha_of(endpoint), ratios.size
    levels = look_levels(endpoint.looks, alpha)
    taken = [(look, level) for look, level in zip(endpoint.looks, levels, strict=True) if look <= n]
    if not taken:
        reason = f"{n} blocks, the first look needs {endpoint.looks[0]}"
        return make_evidence(
            name, "latency", "INCONCLUSIVE", reason, n, needed=endpoint.looks[0], margin=endpoint.margin
        )
    for look, level in taken:
        if not np.ptp(ratios[:look]):
            return lacking(name, "latency", f"{look} blocks with the very same ratio: no clock does that", n)
        said = look_evidence(name, endpoint, rules, ratios[:look], level, spread_at(look))
        if said.verdict != "INCONCLUSIVE":
            break
    return said


def look_evidence(
    name: str, endpoint: policy.Latency, rules: policy.Policy, ratios: np.ndarray, level: float, spread: latency.Spread
) -> Evidence:
    limit, n = math.log1p(endpoint.margin), ratios.size
    test = latency.t_test(ratios, limit, level, spread)
    fail_limit = limit if endpoint.fail_when == "beyond_margin" else 0.0
    within, beyond = test.p_within, latency.t_test(ratios, fail_limit, level, spread).p_beyond
    lo, hi = test.lo, test.hi
    if n >= latency.MIN_RESAMPLED and level >= 1.0 / bootstrap.RESAMPLES:  # both tests must agree
        within = max(within, latency.sign_flip_p(ratios, limit, "less"))
        beyond = max(beyond, latency.sign_flip_p(ratios, fail_limit, "greater"))
        bounds = latency.bca_interval(ratios, level)
        lo, hi = min(lo, bounds[0]), max(hi, bounds[1])
    power = latency.t_power(n, limit, spread.tau, level, spread.df)
    needed = next_look(endpoint, rules, limit, spread.tau)
    enough = power >= rules.power
    verdict, why = ruling(within, beyond, level, enough, f"{n} blocks have power {power:.2f}", needed, "blocks")
    reason = f"{endpoint.metric} {math.expm1(test.mean):+.2%} over {n} blocks, tau {spread.tau:.2%}: {why}"
    return make_evidence(
        name, "latency", verdict, reason, n, effect=test.mean, lo=lo, hi=hi, p_within=within, p_beyond=beyond,
        margin=endpoint.margin, level=level, power=power, needed=needed,
    )  # fmt: skip


def next_look(endpoint: policy.Latency, rules: policy.Policy, limit: float, tau: float) -> int | None:
    """The first look with enough power; beyond the last, the blocks that a single look would need."""
    levels = look_levels(endpoint.looks, rules.alpha_of(endpoint))
    for look, level in zip(endpoint.looks, levels, strict=True):
        if latency.t_power(look, limit, tau, level) >= rules.power:
            return look
    return latency.needed_blocks(limit, tau, levels[-1], rules.power)
