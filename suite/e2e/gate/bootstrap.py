"""The cluster bootstrap: whole questions or prompts are drawn, with both arms' observations in them.

A statistic here is a function of column sums over clusters (tokens, verify passes, right answers), which
is what makes thousands of resamples one matrix product.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from suite.e2e.gate.statistics import SEED, upper_score, upper_tail

RESAMPLES = 4999
Statistic = Callable[[np.ndarray], np.ndarray]  # [..., columns] of sums -> [...]


class Bootstrap(NamedTuple):
    """A statistic with its resampled values and its two BCa constants (Efron 1987): bias and acceleration."""

    value: float
    resampled: np.ndarray
    bias: float
    acceleration: float

    def p_within(self, limit: float) -> float:
        """The one-sided p value that the statistic is below `limit`: the level whose BCa bound is `limit`."""
        return upper_tail(self.score(limit))

    def p_beyond(self, limit: float) -> float:
        """The one-sided p value that the statistic is above `limit`."""
        return upper_tail(-self.score(limit))

    def score(self, limit: float) -> float:
        """The normal score of the BCa confidence that the statistic is below `limit`."""
        n = self.resampled.size
        below = np.count_nonzero(self.resampled < limit) + 0.5 * np.count_nonzero(self.resampled == limit)
        shift = -upper_score(float(np.clip(below / n, 0.5 / (n + 1), 1 - 0.5 / (n + 1)))) - self.bias
        return shift / (1.0 + self.acceleration * shift) - self.bias

    def bound(self, confidence: float) -> float:
        """The one-sided BCa bound below which the statistic is with `confidence`."""
        shift = self.bias - upper_score(confidence)
        share = upper_tail(-self.bias - shift / (1.0 - self.acceleration * shift))
        return float(np.quantile(self.resampled, share))


def cluster_bootstrap(columns: np.ndarray, statistic: Statistic, resamples: int = RESAMPLES) -> Bootstrap:
    """Resample the rows of `columns` [clusters, columns]; ValueError when no two of them would differ."""
    total = columns.sum(axis=0)
    value = float(statistic(total))
    left_out = statistic(total - columns)
    away = left_out.mean() - left_out
    if not np.any(away):
        raise ValueError(f"{len(columns)} clusters that are all alike cannot be resampled")
    resampled = statistic(draws(len(columns), resamples) @ columns)
    below = np.count_nonzero(resampled < value) + 0.5 * np.count_nonzero(resampled == value)
    share = np.clip(below / resamples, 0.5 / (resamples + 1), 1 - 0.5 / (resamples + 1))
    acceleration = float((away**3).sum() / (6.0 * (away**2).sum() ** 1.5))
    return Bootstrap(value, resampled, -upper_score(float(share)), acceleration)


@lru_cache(maxsize=4)
def draws(clusters: int, resamples: int) -> np.ndarray:
    """[resamples, clusters]: how often each cluster is drawn, the same on every machine."""
    random = np.random.default_rng(SEED)
    return random.multinomial(clusters, np.full(clusters, 1.0 / clusters), size=resamples).astype(np.float64)
