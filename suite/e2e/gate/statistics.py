"""What every endpoint shares: intervals for rates, error control over many cells, and over repeated looks.

Pure functions on numbers. scipy is loaded by the call that needs it, so that naming this module costs nothing.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

SEED = 20_261_201  # of every resampling in the gate: the same inputs give the same decision, bit for bit
GRID = 1601  # points of each numeric integral; the levels are good to 1e-6
FAR = 8.0  # standard deviations; beyond, a normal density is below 1e-15


def upper_tail(score: float) -> float:
    """P(Z > score) of a standard normal Z. scipy.stats says the same fifty times slower."""
    from scipy.special import ndtr

    return float(ndtr(-score))


def upper_score(tail: float) -> float:
    """The score that a standard normal exceeds with probability `tail`."""
    from scipy.special import ndtri

    return float(-ndtri(tail))


def clopper_pearson(count: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact two-sided interval of a rate seen `count` times in `n` (Clopper and Pearson 1934)."""
    from scipy.stats import beta

    tail = (1.0 - confidence) / 2.0
    low = 0.0 if count == 0 else float(beta.ppf(tail, count, n - count + 1))
    high = 1.0 if count == n else float(beta.ppf(1.0 - tail, count + 1, n - count))
    return low, high


def false_discovery_q(p_values: Sequence[float]) -> list[float]:
    """Benjamini and Hochberg's q of each p value, in the same order."""
    from scipy.stats import false_discovery_control

    return [float(q) for q in false_discovery_control(p_values)] if p_values else []


def spent_alpha(fraction: float, alpha: float) -> float:
    """The one-sided error that may be spent by an information fraction, O'Brien-Fleming-like (Lan and DeMets 1983)."""
    return 2.0 * upper_tail(upper_score(alpha / 2.0) / math.sqrt(fraction))


@lru_cache
def look_levels(looks: tuple[int, ...], alpha: float) -> tuple[float, ...]:
    """The one-sided level of the test at each look, `looks` being the numbers of blocks seen by then.

    Whatever look stops the test, a false rejection has probability `alpha` in all. The sum of the first
    k increments is a Brownian motion at times n_k / n_K; its density below the earlier bounds is carried
    along on a grid (Armitage, McPherson and Rowe 1969). Levels and not bounds, so that they hold a t test as well.
    """
    from scipy.optimize import brentq
    from scipy.special import ndtr
    from scipy.stats import norm

    times = [look / looks[-1] for look in looks]
    spent, levels = 0.0, []
    points, density = np.zeros(1), np.ones(1)  # before the first look the motion stands at 0
    weights = np.ones(1)
    for last, time in zip([0.0, *times], times, strict=False):
        step = math.sqrt(time - last)
        mass = density * weights

        def crossing(bound: float, mass: np.ndarray = mass, points: np.ndarray = points, step: float = step) -> float:
            return float(mass @ ndtr((points - bound) / step))

        share = spent_alpha(time, alpha) - spent
        spread = FAR * math.sqrt(time)
        if share < crossing(spread):
            bound = spread  # nothing can be spent here that a double could hold
        else:
            bound = float(brentq(lambda b, share=share, crossing=crossing: crossing(b) - share, -spread, spread))
        spent += share
        levels.append(upper_tail(bound / math.sqrt(time)))
        grid = np.linspace(-spread, bound, GRID)
        density = norm.pdf((grid[:, None] - points[None, :]) / step) @ mass / step
        points, weights = grid, simpson_weights(grid)
    return tuple(levels)


def simpson_weights(grid: np.ndarray) -> np.ndarray:
    """Weights that integrate over an even number of equal steps (Simpson's rule)."""
    weights = np.full(grid.size, 2.0)
    weights[1::2] = 4.0
    weights[[0, -1]] = 1.0
    return weights * (grid[1] - grid[0]) / 3.0
