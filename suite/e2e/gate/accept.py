"""Accept length of a speculative draft: generated tokens over verify passes.

Both are counters, kept by prompt. The loss is `log(static / candidate)`, positive where the candidate's
draft is worse; prompts are the clusters. A draft that reads other requests' rows still runs, at an accept
length of 1: hence the floor, which needs no test.
"""

import math
from typing import NamedTuple

import numpy as np

from suite.e2e.gate.bootstrap import Bootstrap, cluster_bootstrap
from suite.e2e.gate.statistics import upper_score, upper_tail


class Counters(NamedTuple):
    """Per prompt: tokens generated and the verify passes that took, both [prompts]."""

    tokens: np.ndarray
    passes: np.ndarray

    @property
    def accept_length(self) -> float:
        return float(self.tokens.sum() / self.passes.sum())


def truncate(tokens_by_pass: np.ndarray, limit: np.ndarray) -> Counters:
    """Counters up to `limit` [prompts] tokens from tokens per pass [prompts, passes], 0 after a prompt's last pass.

    Accept length drifts with the length of the text, so arms are compared over their common length. The pass that
    crosses the limit counts by the share of its tokens that lie before it.
    """
    ends = np.cumsum(tokens_by_pass, axis=1)
    kept = np.clip(limit[:, None] - (ends - tokens_by_pass), 0, tokens_by_pass)
    shares = np.divide(kept, tokens_by_pass, out=np.zeros(kept.shape), where=tokens_by_pass > 0)
    return Counters(kept.sum(axis=1).astype(float), shares.sum(axis=1))


def common_length(static: np.ndarray, candidate: np.ndarray) -> tuple[Counters, Counters]:
    """Both arms' counters over each prompt's common length, from tokens per pass [prompts, passes]."""
    limit = np.minimum(static.sum(axis=1), candidate.sum(axis=1))
    return truncate(static, limit), truncate(candidate, limit)


def accept_loss(static: Counters, candidate: Counters) -> Bootstrap:
    """The paired cluster bootstrap of the loss; ValueError when the prompts are all alike."""
    columns = np.stack([static.tokens, static.passes, candidate.tokens, candidate.passes], axis=1)
    return cluster_bootstrap(columns, loss_of_sums)


def loss_of_sums(sums: np.ndarray) -> np.ndarray:
    """log(static / candidate) accept length from sums [..., 4]."""
    return np.log(sums[..., 0] / sums[..., 1]) - np.log(sums[..., 2] / sums[..., 3])


def bootstrap_power(spread: float, distance: float, level: float) -> float:
    """The probability that a true loss of 0 is shown to be within `distance`, `spread` being the standard error."""
    return 1.0 if spread == 0.0 else upper_tail(upper_score(level) - distance / spread)


def positions_worse_p(
    static: tuple[np.ndarray, np.ndarray], candidate: tuple[np.ndarray, np.ndarray]
) -> tuple[float, float]:
    """That the candidate's drafts are accepted less often, position by position: p and pooled odds ratio.

    Each arm is (accepted, proposed), both [prompts, positions]. Cochran, Mantel and Haenszel's test, stratified by
    prompt and position, so that neither hard prompts nor late positions pass for a difference of the arms. p is
    two-sided where the candidate is worse and 1 where it is not. The odds ratio is static over candidate: above 1 is
    worse. ValueError when no stratum has anything to compare.
    """
    from statsmodels.stats.contingency_tables import StratifiedTable

    tables = np.array(
        [[static[0], static[1] - static[0]], [candidate[0], candidate[1] - candidate[0]]], dtype=float
    ).reshape(2, 2, -1)
    informative = (tables.sum(axis=1) > 0).all(axis=0) & (tables.sum(axis=0) > 0).all(axis=0)
    if not informative.any():
        raise ValueError("no prompt and position where drafts were both accepted and rejected")
    table = StratifiedTable(tables[:, :, informative])
    test = table.test_null_odds(correction=False)
    excess = float((tables[0, 0] - expected_accepted(tables))[informative].sum())
    p = float(test.pvalue) if excess > 0.0 else 1.0
    crossed = tables[0, 1, informative] @ (tables[1, 0, informative] / tables.sum(axis=(0, 1))[informative])
    return p, float(table.oddsratio_pooled) if crossed > 0 else float("inf")


def expected_accepted(tables: np.ndarray) -> np.ndarray:
    """What the static arm would accept in each stratum [2, 2, strata] if the arms did not differ."""
    total = np.maximum(tables.sum(axis=(0, 1)), 1.0)
    return tables[0].sum(axis=0) * tables[:, 0].sum(axis=0) / total


def needed_prompts(n: int, spread: float, distance: float, level: float, power: float) -> int:
    """About how many prompts have that power, when `n` have a standard error of `spread`."""
    return math.ceil(n * ((upper_score(level) - upper_score(power)) * spread / distance) ** 2)
