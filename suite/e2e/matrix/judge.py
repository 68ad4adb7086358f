"""Holding an arm to its cell's static arm, and every arm to what it claims.

On one machine, one backend and one schedule the arms' arithmetic is the same, so their logits must be
bit-identical: the bound is 0.0. A unified run whose pages did not move proves nothing and is void. What
is judged wrong loses its timings: a wrong result has no latency. Pure functions, no torch.
"""

import math

import numpy as np
from msgspec.structs import replace

from suite.records import METRICS, Arm, Cell, Metric, Outcome, Record, Samples

MIN_MOVED_SHARE = 0.5  # of the live pages: below, the page map is too near the identity to prove anything


class Exactness(Record):
    """How far an arm's answers are from the static arm's, over the same requests."""

    of: str  # "logit" or "output"
    max_diff: float
    values: int
    token_mismatches: int = 0
    tokens: int = 0
    first: int | None = None  # position (of the samples' first axis) where the two part

    @property
    def exact(self) -> bool:
        return self.max_diff == 0.0 and self.token_mismatches == 0


class Ruling(Record):
    """An outcome as it enters the database, and how exact it is when that could be told."""

    outcome: Outcome
    exactness: Exactness | None = None


def judge(cell: Cell, arm: Arm, outcome: Outcome, static: Outcome | None) -> Ruling:
    """Rule on `outcome` of `arm`; `static` is the ruled outcome of its cell's static arm, None when there is none."""
    if outcome.status not in ("passed", "wrong"):
        return Ruling(outcome=outcome)
    if outcome.status == "passed" and outcome.launcher != cell.launcher:
        reason = f"executed by {outcome.launcher}, the cell asks for {cell.launcher}"
        outcome = wrong(outcome, "launcher_differs", reason)
    if arm.is_reference:
        return Ruling(outcome=outcome)
    exactness = None
    if static is not None and static.status == "passed":
        outcome, exactness = compare(outcome, static, arm.label or "unified")
    return Ruling(outcome=outcome if arm.pool == "static" else check_moved(outcome), exactness=exactness)


def compare(outcome: Outcome, static: Outcome, arm: str = "unified") -> tuple[Outcome, Exactness | None]:
    """`outcome` with its distance from `static`, wrong unless that is zero."""
    if reason := not_comparable(outcome, static):
        return wrong(outcome, "not_comparable", reason), None
    names = ("output",) if find(static, "output") else ("logits", "tokens")
    pairs = {name: (find(static, name), find(outcome, name)) for name in names}
    for name, (a, b) in pairs.items():
        if a is None or b is None:
            lacking = "static" if a is None else arm
            return wrong(outcome, "not_comparable", f"the {lacking} arm has no samples of {name}"), None
        if a.shape != b.shape or 0 in a.shape:
            reason = f"{name} of shapes {list(a.shape)} static and {list(b.shape)} {arm}"
            return wrong(outcome, "shapes_differ", reason), None
    unpacked = {name: (a.unpack(), b.unpack()) for name, (a, b) in pairs.items() if a and b}
    of = names[0].removesuffix("s")
    exactness = measure_exactness(of, unpacked[names[0]], unpacked.get("tokens"))
    outcome = replace(outcome, metrics={**outcome.metrics, **exactness_metrics(exactness)})
    if not exactness.exact:
        reason = f"largest {of} difference {exactness.max_diff:g} over {exactness.values} values"
        if exactness.first is not None:
            reason += f", the first at position {exactness.first}"
        if exactness.tokens:
            reason += f", {exactness.token_mismatches} of {exactness.tokens} tokens differ"
        outcome = wrong(outcome, f"{of}s_differ", f"{reason}, expected 0")
    return outcome, exactness


def not_comparable(outcome: Outcome, static: Outcome) -> str | None:
    """Why the two cannot be compared; None when they can."""
    for field in ("launcher", "prompt_hash"):
        a, b = getattr(static, field), getattr(outcome, field)
        if a != b or a is None:
            return f"{field} is {a} in the static arm and {b} in the unified arm"
    return None


def find(outcome: Outcome, metric: str) -> Samples | None:
    return next((samples for samples in outcome.samples if samples.metric == metric), None)


def measure_exactness(
    of: str, values: tuple[np.ndarray, np.ndarray], tokens: tuple[np.ndarray, np.ndarray] | None = None
) -> Exactness:
    """Distances of logits or outputs, of any one shape, and of token ids; NaN when any pair has no distance.

    Equal infinities are equal: a masked logit is -inf in both arms. A NaN is never equal to anything.
    """
    a, b = (array.astype(np.float64) for array in values)
    with np.errstate(invalid="ignore"):
        distance = np.where(a == b, 0.0, np.abs(a - b))
    parted = np.flatnonzero((distance.reshape(len(distance), -1) != 0.0).any(axis=1))  # NaN is not 0 either
    return Exactness(
        of=of,
        first=int(parted[0]) if parted.size else None,
        max_diff=float(distance.max()),  # NaN wins
        values=distance.size,
        token_mismatches=int((tokens[0] != tokens[1]).sum()) if tokens else 0,
        tokens=int(tokens[0].size) if tokens else 0,
    )


def exactness_metrics(exactness: Exactness) -> dict[str, Metric]:
    """The metrics of `exactness`; a distance that is no number is none, its row's reason tells it."""
    metrics = {}
    if exactness.tokens:
        metrics["token_mismatches"] = Metric.of("token_mismatches", exactness.token_mismatches, exactness.tokens)
    if math.isfinite(exactness.max_diff):
        name = f"max_{exactness.of}_diff"
        metrics[name] = Metric.of(name, exactness.max_diff, exactness.values)
    return metrics


def check_moved(outcome: Outcome) -> Outcome:
    """A unified outcome is void unless compaction had moved enough of the pages that were read."""
    moved = outcome.metrics.get("moved_share")
    if moved is not None and moved.value >= MIN_MOVED_SHARE:
        return outcome
    share = "no share of moved pages" if moved is None else f"{moved.value:.1%} of the pages that were read had moved"
    return wrong(outcome, "identity_map", f"{share}, a unified run needs at least {MIN_MOVED_SHARE:.0%}")


def wrong(outcome: Outcome, reason_code: str, reason: str) -> Outcome:
    """`outcome` as wrong, without timings. The first finding keeps the code, every finding is in the reason."""
    if outcome.status == "wrong":
        reason_code, reason = outcome.reason_code or reason_code, f"{outcome.reason}; {reason}"
    return replace(without_timings(outcome), status="wrong", reason_code=reason_code, reason=reason)


def without_timings(outcome: Outcome) -> Outcome:
    """`outcome` without its timing metrics and their samples: what every row that did not pass must be."""

    def kept(name: str) -> bool:
        kind = METRICS.get(name.partition(".")[0])
        return kind is None or not kind.timing

    metrics = {name: metric for name, metric in outcome.metrics.items() if kept(name)}
    return replace(outcome, metrics=metrics, samples=tuple(s for s in outcome.samples if kept(s.metric)))
