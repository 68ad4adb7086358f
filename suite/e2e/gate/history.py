"""History: did a cell's nightly log ratio step, and does it creep away from a pinned release?

Steps are found by E-divisive (Matteson and James, "A nonparametric approach for multiple change point
analysis of multivariate data", JASA 2014): the split with the largest energy distance, held against
permutations of the nights inside its segment, then again inside both halves. Creep is found by a one-sided
CUSUM against the pinned release's mean (Page 1954), which a slow ratchet cannot outrun.
"""

import itertools
from typing import NamedTuple

import numpy as np

from suite.e2e.gate.statistics import SEED

MIN_SEGMENT = 3  # nights on either side of a step
PERMUTATIONS = 999
ENOUGH = 20  # permutations that split as well: the p value is then known well enough (Besag and Clifford 1991)


class Step(NamedTuple):
    """A change point: the first night after it, its p value, and how much the mean rose there."""

    night: int
    p: float
    rise: float


def find_steps(series: np.ndarray, level: float, permutations: int = PERMUTATIONS) -> list[Step]:
    """The steps of `series` [nights] in time order. Each is significant at `level` within its segment."""
    random = np.random.default_rng(SEED)
    bounds, p_values = [0, series.size], {}
    while True:
        best = max(
            (
                (*best_split(series[start:end]), start, end)
                for start, end in itertools.pairwise(bounds)
                if end - start >= 2 * MIN_SEGMENT
            ),
            default=None,
        )
        if best is None:
            break
        p = permutation_p(series, bounds, best[0], permutations, random)
        if p > level:
            break
        night = best[2] + best[1]
        p_values[night] = p
        bounds = sorted([*bounds, night])
    around = zip(bounds, bounds[1:], bounds[2:], strict=False)
    return [Step(b, p_values[b], float(series[b:c].mean() - series[a:b].mean())) for a, b, c in around]


def permutation_p(
    series: np.ndarray, bounds: list[int], found: float, permutations: int, random: np.random.Generator
) -> float:
    """How often nights shuffled within their segments split at least as well as `found`."""
    at_least = 0
    for tried in range(1, permutations + 1):
        best = 0.0
        for start, end in itertools.pairwise(bounds):
            if end - start >= 2 * MIN_SEGMENT:
                best = max(best, best_split(random.permutation(series[start:end]))[0])
        at_least += best >= found
        if at_least == ENOUGH:
            return ENOUGH / tried
    return (at_least + 1) / (permutations + 1)


def best_split(segment: np.ndarray) -> tuple[float, int]:
    """The largest scaled energy distance of two parts of `segment`, and where the second begins.

    For parts of n and m nights it is n m / (n + m) (2 E|X-Y| - E|X-X'| - E|Y-Y'|), the within-part means
    over distinct pairs, as in the paper's equations (5) to (7) with exponent 1 and the right part whole.
    """
    size = segment.size
    distance = np.abs(segment[:, None] - segment[None, :])
    corner = distance.cumsum(axis=0).cumsum(axis=1)  # corner[i, j]: sum over the first i+1 and j+1 nights
    n = np.arange(MIN_SEGMENT, size - MIN_SEGMENT + 1)
    m = size - n
    left = corner[n - 1, n - 1]
    across = corner[n - 1, -1] - left
    right = corner[-1, -1] - left - 2.0 * across
    energy = 2.0 * across / (n * m) - left / (n * (n - 1)) - right / (m * (m - 1))
    scaled = energy * n * m / (n + m)
    at = int(np.argmax(scaled))
    return float(scaled[at]), int(n[at])


def creep(series: np.ndarray, pinned: float, tau: float, slack: float = 2.5, limit: float = 6.0) -> int | None:
    """The first night on which the one-sided CUSUM of (series - pinned) / tau passes `limit`; None if it never does.

    The pin is one night itself, so it is off by a tau or so for good: the slack allows for two of them, and half a
    tau more. A creep of four taus is then seen within about five nights (`cusum_run_length`).
    """
    total = 0.0
    for night, value in enumerate(series):
        total = max(0.0, total + (value - pinned) / tau - slack)
        if total > limit:
            return night
    return None


def cusum_run_length(shift: float, slack: float, limit: float) -> float:
    """Nights until the CUSUM alarms, on average, at a mean of `shift` taus (Siegmund's approximation, 1985)."""
    drift, reach = shift - slack, limit + 1.166
    if abs(drift) < 1e-9:
        return reach**2
    return float((np.exp(-2 * drift * reach) + 2 * drift * reach - 1) / (2 * drift**2))
