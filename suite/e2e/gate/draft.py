"""Evidence about a speculative draft: its accept length, and where in the block it is believed."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from db.gate_inputs import Row
from suite.e2e.gate import accept, policy
from suite.e2e.gate.endpoints import ruling
from suite.e2e.gate.pairs import NoNumberError, Pair
from suite.e2e.gate.verdicts import Evidence, lacking, make_evidence


def counter(row: Row, name: str) -> np.ndarray:
    """Raw counts of one row, [prompts] or [prompts, more]; NoNumberError when they are none."""
    where = f"{name} in block {row.block} of run {row.run}"
    if name not in row.counters:
        raise NoNumberError(f"{where} is missing")
    rows = row.counters[name]
    for value in flat(rows):
        if value is None or isinstance(value, str):
            raise NoNumberError(f"{where} has a count that is {'null' if value is None else value}")
    counts = np.array(rows, dtype=float)
    if counts.size == 0 or (counts < 0).any() or not np.isfinite(counts).all():
        raise NoNumberError(f"{where} is empty or below 0")
    return counts


def flat(rows: Iterable[object]) -> Iterable[object]:
    for value in rows:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def arm_counters(pairs: Sequence[Pair]) -> tuple[accept.Counters, accept.Counters]:
    """Both arms' counters, summed over the blocks and cut to each prompt's common length.

    `accept_tokens` is [prompts] beside `verify_passes`, or [prompts, passes] when it says what every pass gave.
    """
    sums: list[list[np.ndarray]] = [[], []]
    for pair in pairs:
        static, candidate = (counter(row, "accept_tokens") for row in pair)
        if len(static) != len(candidate):
            raise NoNumberError(f"{len(static)} prompts in the static arm and {len(candidate)} in the candidate")
        if static.ndim == 2 and candidate.ndim == 2:
            both = accept.common_length(static, candidate)
        elif not np.array_equal(static, candidate):
            raise NoNumberError("prompts of unequal length need accept_tokens by pass, to be cut to the common length")
        else:
            both = tuple(
                accept.Counters(t, counter(r, "verify_passes")) for t, r in zip((static, candidate), pair, strict=True)
            )  # type: ignore[assignment]
        for side, counters in zip(sums, both, strict=True):
            side.append(np.stack([counters.tokens, counters.passes]))
    if len({part.shape for side in sums for part in side}) > 1:
        raise NoNumberError("the blocks have different numbers of prompts")
    return accept.Counters(*np.sum(sums[0], axis=0)), accept.Counters(*np.sum(sums[1], axis=0))


def accept_evidence(name: str, endpoint: policy.Accept, rules: policy.Policy, pairs: Sequence[Pair]) -> Evidence:
    """E3: the accept length is within the margin. At the floor the draft reads the wrong rows, and needs no test."""
    alpha, margin = rules.alpha_of(endpoint), math.log1p(endpoint.margin)
    static, candidate = arm_counters(pairs)
    n = static.tokens.size
    for arm, counters in (("static", static), ("candidate", candidate)):
        if (counters.passes <= 0).any() or (counters.tokens < counters.passes - 1e-9).any():
            return lacking(name, "accept", f"a prompt of the {arm} arm has fewer tokens than verify passes, or none", n)
    lengths = f"accept length {static.accept_length:.3f} static, {candidate.accept_length:.3f} candidate, {n} prompts"
    loss = math.log(static.accept_length / candidate.accept_length)
    known = {"effect": loss, "margin": margin, "level": alpha}
    if static.accept_length <= endpoint.floor:
        return lacking(name, "accept", f"{lengths}: the static arm's own draft is at the floor, {endpoint.floor}", n)
    if candidate.accept_length <= endpoint.floor:
        reason = f"{lengths}: at the floor, {endpoint.floor}, as of a mis-addressed draft"
        return make_evidence(name, "accept", "FAIL", reason, n, **known)
    enough = n >= endpoint.min_prompts
    if np.array_equal(static.tokens, candidate.tokens) and np.array_equal(static.passes, candidate.passes):
        why = "the same in every prompt" if enough else f"{endpoint.min_prompts} prompts are needed"
        known |= {"lo": loss, "hi": loss, "power": 1.0, "needed": endpoint.min_prompts}
        return make_evidence(name, "accept", "PASS" if enough else "INCONCLUSIVE", f"{lengths}: {why}", n, **known)
    found = accept.accept_loss(static, candidate)
    spread = float(np.std(found.resampled))
    power = accept.bootstrap_power(spread, margin, alpha)
    within = found.p_within(margin)
    p_fail = found.p_beyond(margin if endpoint.fail_when == "beyond_margin" else 0.0)
    needed = max(endpoint.min_prompts, accept.needed_prompts(n, spread, margin, alpha, rules.power))
    enough = enough and power >= rules.power
    verdict, why = ruling(within, p_fail, alpha, enough, f"{n} prompts have power {power:.2f}", needed, "prompts")
    known |= {"lo": found.bound(alpha), "hi": found.bound(1.0 - alpha), "p_within": within, "p_beyond": p_fail}
    known |= {"power": power, "needed": needed}
    return make_evidence(name, "accept", verdict, f"{lengths}: {why}", n, **known)


def positions_evidence(name: str, alpha: float, pairs: Sequence[Pair]) -> Evidence:
    """Are drafts accepted less often at some positions, though the accept length holds?"""
    sides = []
    for side in (0, 1):
        counts = [np.stack([counter(p[side], "accepted_at"), counter(p[side], "proposed_at")]) for p in pairs]
        if len({c.shape for c in counts}) != 1 or counts[0].ndim != 3:
            raise NoNumberError("accepted_at and proposed_at must be [prompts, positions], the same in every block")
        sides.append(np.sum(counts, axis=0))
    if sides[0].shape != sides[1].shape:
        raise NoNumberError(f"drafts of shape {sides[0].shape[1:]} static and {sides[1].shape[1:]} candidate")
    if any((accepted > proposed).any() for accepted, proposed in sides):
        raise NoNumberError("more drafts were accepted than proposed")
    n = sides[0].shape[1]
    if np.array_equal(*sides):
        return make_evidence(name, "positions", "QUIET", "the same at every position of every prompt", n, effect=0.0)
    try:
        p, odds = accept.positions_worse_p((sides[0][0], sides[0][1]), (sides[1][0], sides[1][1]))
    except ValueError as error:
        return lacking(name, "positions", str(error), n)
    effect = math.log(odds) if 0.0 < odds < math.inf else None
    reason = f"odds of acceptance, static over candidate, {odds:.3g} over {n} prompts, p {p:.2g}"
    verdict = "FAIL" if p <= alpha else "QUIET"
    return make_evidence(name, "positions", verdict, reason, n, effect=effect, p_beyond=p, level=alpha)
