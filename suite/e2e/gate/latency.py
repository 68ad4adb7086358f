"""Latency: is the candidate slower than the static pool by more than a margin?

The observation is a block's log ratio `d = log(candidate / static)`, signed so that positive is worse; a
block is a fresh paired run of both arms, and what is repeated inside one is no replicate. Ratios are
tested against `log(1 + margin)` by a one-sided paired t, whose standard deviation may be shrunk towards
the family's, and from ten blocks on by a sign-flip test that needs no normal distribution.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from suite.e2e.gate.bootstrap import RESAMPLES, cluster_bootstrap
from suite.e2e.gate.statistics import SEED, upper_tail

MIN_RESAMPLED = 10  # blocks; below, resampling has too few distinct outcomes to say anything
EXACT_FLIPS = 12  # blocks up to which every one of the 2^n sign patterns is tried
MAX_BLOCKS = 100_000


class Spread(NamedTuple):
    """A standard deviation of block log ratios with its degrees of freedom."""

    tau: float
    df: float


class TTest(NamedTuple):
    """One-sided tests of a mean against a limit. `p_within`: that it is below; `p_beyond`: that it is above."""

    mean: float
    lo: float
    hi: float
    p_within: float
    p_beyond: float


def log_ratios(static: Sequence[float], candidate: Sequence[float], better: str) -> np.ndarray:
    """[blocks] of log ratios, positive where the candidate is worse; `better` is "lower" or "higher"."""
    ratios = np.log(np.asarray(candidate, float) / np.asarray(static, float))
    return ratios if better == "lower" else -ratios


def sample_spread(ratios: np.ndarray) -> Spread:
    return Spread(float(np.std(ratios, ddof=1)), ratios.size - 1.0)


def t_test(ratios: np.ndarray, limit: float, level: float, spread: Spread | None = None) -> TTest:
    """The mean of `ratios` against `limit`; `lo` and `hi` are one-sided bounds at `level` each."""
    from scipy.special import stdtr, stdtrit

    tau, df = spread or sample_spread(ratios)
    mean, error = float(np.mean(ratios)), tau / math.sqrt(ratios.size)
    reach = -float(stdtrit(df, level)) * error
    stand = (mean - limit) / error
    return TTest(mean, mean - reach, mean + reach, float(stdtr(df, stand)), float(stdtr(df, -stand)))


def sign_flip_p(ratios: np.ndarray, limit: float, alternative: str) -> float:
    """The p value that the ratios lie below ("less") or above ("greater") `limit`, by flipping signs around it.

    Exact up to `EXACT_FLIPS` blocks, by `RESAMPLES` random patterns beyond. The same test as scipy's
    `permutation_test(permutation_type="samples")`, whose loop over patterns takes 1 s for 2^16 of them.
    """
    away = ratios - limit if alternative == "greater" else limit - ratios
    patterns = sign_patterns(ratios.size)
    found = float(away.sum()) - 1e-12 * float(np.abs(away).sum())  # equal sums in another order are equal
    as_far = int(np.count_nonzero(patterns @ away >= found))
    return as_far / len(patterns) if ratios.size <= EXACT_FLIPS else (as_far + 1) / (len(patterns) + 1)


@lru_cache(maxsize=8)
def sign_patterns(n: int) -> np.ndarray:
    """[patterns, n] of -1 and 1: all of them, or as many random ones as are resampled."""
    if n <= EXACT_FLIPS:
        bits = np.arange(2**n)[:, None] >> np.arange(n)[None, :] & 1
    else:
        bits = np.random.default_rng(SEED).integers(0, 2, (RESAMPLES, n))
    return 1.0 - 2.0 * bits


def bca_interval(ratios: np.ndarray, level: float) -> tuple[float, float]:
    """Bias-corrected and accelerated bootstrap bounds of the mean, one-sided at `level` each."""
    found = cluster_bootstrap(ratios[:, None], lambda sums: sums[..., 0] / ratios.size)
    return found.bound(level), found.bound(1.0 - level)


def t_power(n: int, distance: float, tau: float, level: float, df: float | None = None) -> float:
    """The probability that a one-sided t test of `n` blocks rejects at `level` when the mean is `distance` away."""
    from scipy.special import nctdtr, stdtrit

    df = n - 1.0 if df is None else df
    if tau == 0.0:
        return 1.0
    shift = distance * math.sqrt(n) / tau
    critical = -float(stdtrit(df, level))
    power = 1.0 - float(nctdtr(df, shift, critical))
    # far from its centre scipy's noncentral t may be NaN; there the normal distribution is exact enough
    return power if math.isfinite(power) else upper_tail(critical - shift)


def needed_blocks(distance: float, tau: float, level: float, power: float) -> int | None:
    """The fewest blocks with that power; None beyond `MAX_BLOCKS`."""
    high = 2
    while t_power(high, distance, tau, level) < power:
        high *= 2
        if high > MAX_BLOCKS:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if t_power(middle, distance, tau, level) >= power else (middle, high)
    return max(high, 2)


def shrink_spreads(spreads: Sequence[Spread]) -> list[Spread]:
    """Each spread shrunk towards the family's: empirical Bayes over a scaled chi-square (Smyth 2004, section 6.2).

    The prior is fitted to the log variances by moments. With fewer than three members there is no family to learn
    from, and every spread stays as it is.
    """
    if len(spreads) < 3:
        return list(spreads)
    from scipy.special import digamma, polygamma

    df = np.array([spread.df for spread in spreads])
    variance = np.array([spread.tau**2 for spread in spreads])
    shifted = np.log(variance) - digamma(df / 2) + np.log(df / 2)
    excess = float(np.var(shifted, ddof=1) - np.mean(polygamma(1, df / 2)))
    pooled = float(df.sum())
    if excess <= 0.0:  # the variances differ no more than chance makes them: one spread for all
        prior_df, prior = math.inf, math.exp(float(np.mean(shifted)))
    else:
        prior_df = 2.0 * inverse_trigamma(excess)
        prior = math.exp(float(np.mean(shifted) + digamma(prior_df / 2) - math.log(prior_df / 2)))
    shrunk = []
    for one, own_df in zip(variance, df, strict=True):
        mixed = prior if math.isinf(prior_df) else (prior_df * prior + own_df * one) / (prior_df + own_df)
        shrunk.append(Spread(math.sqrt(mixed), min(prior_df + own_df, pooled)))
    return shrunk


def inverse_trigamma(value: float) -> float:
    """The x > 0 with trigamma(x) = value, by Newton's method on 1/trigamma, which is nearly straight (Smyth 2004)."""
    from scipy.special import polygamma

    x = 0.5 + 1.0 / value
    for _ in range(50):
        trigamma = float(polygamma(1, x))
        step = trigamma * (1.0 - trigamma / value) / float(polygamma(2, x))
        x += step
        if -step / x < 1e-10:
            break
    return x
