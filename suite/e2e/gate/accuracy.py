"""Accuracy: the same questions asked of both arms.

`lost` counts questions that the static arm had right and the candidate has wrong, `won` the other way
round; their difference over all `n` questions is the loss. Not worse than a margin is shown by Tango's
score test, a loss by McNemar's exact test, and answers that merely change too often by an excess of flips.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from suite.e2e.gate.statistics import upper_score, upper_tail

MAX_ITEMS = 10_000_000


class Flips(NamedTuple):
    """How the answers of two arms to `n` questions differ."""

    lost: int
    won: int
    n: int

    @property
    def loss(self) -> float:
        return (self.lost - self.won) / self.n

    @property
    def discordance(self) -> float:
        return (self.lost + self.won) / self.n


def count_flips(static: np.ndarray, candidate: np.ndarray) -> Flips:
    """Flips between two bool arrays [items] of the same questions in the same order."""
    return Flips(int((static & ~candidate).sum()), int((~static & candidate).sum()), static.size)


def tango_score(lost: np.ndarray | int, won: np.ndarray | int, n: int, loss: float) -> np.ndarray:
    """Tango's score statistic (Statistics in Medicine 1998) for the loss, standard normal when `loss` is true.

    The nuisance parameter P(won) takes its maximum-likelihood value under that loss. Works on arrays.
    """
    lost, won = np.asarray(lost, float), np.asarray(won, float)
    linear = (2 * n - lost + won) * loss - lost - won
    constant = -won * loss * (1.0 - loss)
    root = np.sqrt(np.maximum(linear**2 - 8 * n * constant, 0.0))  # rounding can leave it a hair below
    rate = (root - linear) / (4 * n)
    variance = n * (2 * rate + loss * (1.0 - loss))
    difference = lost - won - n * loss
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(difference == 0.0, 0.0, difference / np.sqrt(np.maximum(variance, 0.0)))


def tango_p(flips: Flips, margin: float) -> tuple[float, float]:
    """One-sided p values that the loss is within `margin`, and that it is beyond."""
    score = float(tango_score(flips.lost, flips.won, flips.n, margin))
    return upper_tail(-score), upper_tail(score)


def tango_interval(flips: Flips, level: float) -> tuple[float, float]:
    """Bounds of the loss, one-sided at `level` each: the losses that the score test does not reject."""
    from scipy.optimize import brentq

    reach = upper_score(level)

    def solve(aim: float) -> float:
        def off(loss: float) -> float:
            return float(tango_score(flips.lost, flips.won, flips.n, loss)) - aim

        ends = (-1.0 + 1e-12, 1.0 - 1e-12)
        if off(ends[0]) * off(ends[1]) > 0.0:
            return math.copysign(1.0, -aim)
        return float(brentq(off, *ends, xtol=1e-12))

    return solve(reach), solve(-reach)


@lru_cache(maxsize=4096)
def tango_power(n: int, margin: float, discordance: float, level: float) -> float:
    """The probability that `n` questions show a true loss of 0 to be within `margin`, exactly enumerated."""
    from scipy.stats import binom

    low, high = (int(binom.ppf(q, n, discordance)) for q in (1e-9, 1 - 1e-9))
    flips = np.arange(low, high + 1)[:, None]
    lost = np.arange(0, high + 1)[None, :]
    won = flips - lost
    shown = tango_score(lost, np.maximum(won, 0), n, margin) <= -upper_score(level)
    weight = binom.pmf(flips, n, discordance) * binom.pmf(lost, flips, 0.5)
    return float((weight * shown * (won >= 0)).sum())


def needed_items(margin: float, discordance: float, level: float, power: float) -> int | None:
    """About the fewest questions with that power, by the normal approximation; None beyond `MAX_ITEMS`."""
    spread = max(discordance, margin)  # with hardly any flips the score test's own variance takes over
    n = math.ceil((upper_score(level) - upper_score(power)) ** 2 * spread / margin**2)
    return n if n <= MAX_ITEMS else None


def mcnemar_worse_p(flips: Flips) -> float:
    """McNemar's exact test, one-sided: that more is lost than won."""
    from scipy.stats import binomtest

    changed = flips.lost + flips.won
    return 1.0 if changed == 0 else float(binomtest(flips.lost, changed, alternative="greater").pvalue)


def excess_flips_p(candidate_flips: np.ndarray, replicate_flips: np.ndarray) -> float:
    """That the candidate flips more of the same questions than the static arm's replicate does: exact, two-sided.

    Both are bool [items]. Under the null the two flips of one question may be exchanged, so of the questions where
    only one of them flipped, each is the candidate's with probability one half: a permutation test by question.
    """
    only = count_flips(candidate_flips, replicate_flips)
    return min(1.0, 2.0 * mcnemar_worse_p(only))


def excess_rate_p(flips: Flips, rate: float) -> float:
    """That answers flip more often than at the known `rate`: exact, two-sided."""
    from scipy.stats import binomtest

    return min(1.0, 2.0 * float(binomtest(flips.lost + flips.won, flips.n, rate, alternative="greater").pvalue))
