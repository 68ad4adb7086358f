"""The statistics, held against published values and independent implementations."""

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import polygamma
from statsmodels.stats.contingency_tables import StratifiedTable, mcnemar

from suite.e2e.gate import accept, accuracy, history, latency
from suite.e2e.gate.accuracy import Flips
from suite.e2e.gate.bootstrap import cluster_bootstrap, draws
from suite.e2e.gate.statistics import clopper_pearson, false_discovery_q, look_levels, upper_score, upper_tail


def test_clopper_pearson_is_scipys():
    for count, n in ((0, 50), (3, 50), (50, 50), (100, 2000)):
        exact = scipy.stats.binomtest(count, n).proportion_ci(0.95, method="exact")
        assert clopper_pearson(count, n) == pytest.approx((exact.low, exact.high), abs=1e-12)


def test_obrien_fleming_bounds_are_the_published_ones():
    # Lan-DeMets spending of this form, one-sided 0.025, five equal looks: ldBounds and gsDesign print these bounds
    bounds = [upper_score(level) for level in look_levels((1, 2, 3, 4, 5), 0.025)]
    assert bounds == pytest.approx([4.8769, 3.3569, 2.6803, 2.2898, 2.0310], abs=2e-4)
    assert look_levels((8,), 0.05) == pytest.approx((0.05,), abs=1e-9)


def test_looks_spend_alpha_in_all():
    looks = (4, 8, 16, 32)
    random = np.random.default_rng(3)
    sums = random.normal(size=(200_000, 32)).cumsum(axis=1)
    scores = sums[:, np.array(looks) - 1] / np.sqrt(looks)
    bounds = [upper_score(level) for level in look_levels(looks, 0.05)]
    low, high = clopper_pearson(int((scores > bounds).any(axis=1).sum()), 200_000, 0.999)
    assert low < 0.05 < high


@given(st.floats(1e-12, 1 - 1e-12))
def test_the_normal_tail_is_scipys(tail):
    assert upper_score(tail) == pytest.approx(scipy.stats.norm.isf(tail), rel=1e-9, abs=1e-9)
    assert upper_tail(upper_score(tail)) == pytest.approx(tail, rel=1e-6)


def test_q_values_are_benjamini_and_hochbergs():
    assert false_discovery_q([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.16 / 3, 0.16 / 3, 0.5])
    assert false_discovery_q([]) == []


def test_tango_interval_is_the_published_one():
    # Fagerland, Lydersen and Laake, Statistics in Medicine 2014: (1, 1, 7, 12) has Tango's interval (-0.517, -0.026)
    low, high = accuracy.tango_interval(Flips(lost=1, won=7, n=21), 0.025)
    assert (round(low, 3), round(high, 3)) == (-0.517, -0.026)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 200), st.sampled_from([0.05, 0.025]))
@settings(max_examples=60)
def test_tango_interval_solves_the_quartic(lost, won, same, level):
    """The closed form of Yang, Sun and Hardin (2012): the bounds are roots of a quartic."""
    n = lost + won + same
    if n < 5 or lost == won:
        return
    g, d = upper_score(level) ** 2, lost - won
    quartic = [
        n**2 * (n / g + 1) ** 2,
        -n * d * (n / g + 1) * (4 * n / g + 1),
        2 * n * d**2 * (3 * n / g + 2) / g - n**2 * ((lost + won) / g + 1),
        n * d * (2 * (lost + won) / g + 1) - d**3 * (4 * n / g + 1) / g,
        d**2 * (d**2 / g - (lost + won)) / g,
    ]
    roots = np.roots(quartic)
    real = roots[np.abs(roots.imag) < 1e-6].real
    for bound in accuracy.tango_interval(Flips(lost, won, n), level):
        if abs(bound) < 1.0 - 1e-6:
            assert np.abs(real - bound).min() < 1e-5


def test_tango_interval_survives_rounding_at_its_ends():
    for won in range(1, 200):
        for n in (won, won + 1, 10 * won):
            low, high = accuracy.tango_interval(Flips(0, won, n), 0.05)
            assert -1.0 <= low <= -won / n <= high <= 1.0


@given(st.integers(0, 30), st.integers(0, 30))
@settings(max_examples=40)
def test_tango_score_at_zero_is_mcnemars(lost, won):
    score = float(accuracy.tango_score(lost, won, 100, 0.0))
    assert score == pytest.approx((lost - won) / math.sqrt(lost + won) if lost + won else 0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("n", "margin", "discordance", "power"),
    [(200, 0.02, 0.02, 0.49), (200, 0.02, 0.1, 0.21), (1319, 0.02, 0.05, 0.94), (1319, 0.01, 0.02, 0.79),
     (5276, 0.01, 0.05, 0.95)],
)  # fmt: skip
def test_tango_power_is_what_was_simulated(n, margin, discordance, power):
    assert accuracy.tango_power(n, margin, discordance, 0.05) == pytest.approx(power, abs=0.015)


@given(st.integers(0, 25), st.integers(0, 25))
@settings(max_examples=40)
def test_mcnemar_is_statsmodels(lost, won):
    p = accuracy.mcnemar_worse_p(Flips(lost, won, 100))
    two_sided = mcnemar([[0, lost], [won, 0]], exact=True).pvalue
    assert p == pytest.approx(two_sided / 2 if lost > won else p)
    if lost == 0:
        assert p == 1.0


def test_excess_flips_are_counted_by_question():
    candidate, replicate = np.zeros(100, bool), np.zeros(100, bool)
    candidate[:12], replicate[10:14] = True, True  # 10 questions only the candidate flips, 2 only the replicate
    expected = 2 * scipy.stats.binom.sf(9, 12, 0.5)
    assert accuracy.excess_flips_p(candidate, replicate) == pytest.approx(expected)
    assert accuracy.excess_flips_p(replicate, candidate) == 1.0
    assert accuracy.excess_rate_p(Flips(6, 6, 100), 0.02) == pytest.approx(2 * scipy.stats.binom.sf(11, 100, 0.02))


@pytest.mark.parametrize(
    ("tau", "margin", "blocks"),
    [(0.005, 0.01, 4), (0.01, 0.01, 11), (0.01, 0.02, 4), (0.02, 0.01, 36), (0.02, 0.02, 11)],
)
def test_needed_blocks_are_what_was_simulated(tau, margin, blocks):
    assert latency.needed_blocks(math.log1p(margin), tau, 0.05, 0.9) == blocks


def test_needed_blocks_give_up_beyond_reason():
    assert latency.needed_blocks(1e-6, 1.0, 0.05, 0.9) is None


@given(st.integers(2, 60), st.floats(0.0, 0.05), st.floats(0.001, 0.05))
@settings(max_examples=40)
def test_t_power_is_scipys(n, distance, tau):
    shift = distance * math.sqrt(n) / tau
    expected = scipy.stats.nct.sf(scipy.stats.t.isf(0.05, n - 1), n - 1, shift)
    if math.isfinite(expected) and shift < 30:
        assert latency.t_power(n, distance, tau, 0.05) == pytest.approx(expected, abs=1e-6)


def test_t_test_is_scipys():
    ratios = np.random.default_rng(1).normal(0.01, 0.01, 9)
    test = latency.t_test(ratios, 0.02, 0.05)
    assert test.p_within == pytest.approx(scipy.stats.ttest_1samp(ratios, 0.02, alternative="less").pvalue)
    assert test.p_beyond == pytest.approx(1.0 - test.p_within)
    bounds = scipy.stats.ttest_1samp(ratios, 0.0).confidence_interval(0.90)
    assert (test.lo, test.hi) == pytest.approx((bounds.low, bounds.high))


@pytest.mark.parametrize("alternative", ["less", "greater"])
def test_sign_flip_is_scipys(alternative):
    ratios = np.random.default_rng(2).normal(0.015, 0.01, 10)
    exact = scipy.stats.permutation_test(
        (ratios - 0.02,), lambda x, axis: np.mean(x, axis=axis), permutation_type="samples", vectorized=True,
        n_resamples=np.inf, alternative=alternative,
    )  # fmt: skip
    assert latency.sign_flip_p(ratios, 0.02, alternative) == pytest.approx(exact.pvalue)


def test_sign_flips_of_many_blocks_are_near_the_t_test():
    ratios = np.random.default_rng(4).normal(0.0, 0.01, 32)
    assert latency.sign_flip_p(ratios, 0.003, "less") == pytest.approx(
        latency.t_test(ratios, 0.003, 0.05).p_within, abs=0.02
    )


def test_log_ratios_are_positive_where_worse():
    assert latency.log_ratios([10.0], [11.0], "lower")[0] == pytest.approx(math.log(1.1))
    assert latency.log_ratios([10.0], [11.0], "higher")[0] == pytest.approx(-math.log(1.1))


@given(st.floats(1e-3, 1e3))
def test_inverse_trigamma_inverts(value):
    assert float(polygamma(1, latency.inverse_trigamma(value))) == pytest.approx(value, rel=1e-6)


def test_shrinking_finds_the_prior_that_made_the_variances():
    random = np.random.default_rng(5)
    prior_df, prior_tau, df = 8.0, 0.01, 3
    true = prior_tau**2 * prior_df / random.chisquare(prior_df, 4000)
    spreads = [latency.Spread(math.sqrt(v * random.chisquare(df) / df), df) for v in true]
    shrunk = latency.shrink_spreads(spreads)
    assert shrunk[0].df == pytest.approx(prior_df + df, rel=0.1)
    one, own = shrunk[0], spreads[0]
    assert one.tau**2 * (prior_df + df) == pytest.approx(prior_df * prior_tau**2 + df * own.tau**2, rel=0.1)
    error = np.mean([(math.log(s.tau**2 / t)) ** 2 for s, t in zip(shrunk, true, strict=True)])
    assert error < 0.5 * np.mean([(math.log(s.tau**2 / t)) ** 2 for s, t in zip(spreads, true, strict=True)])


def test_shrinking_pools_equal_variances_and_leaves_small_families():
    spreads = [latency.Spread(tau, 5.0) for tau in (0.010, 0.0101, 0.0099, 0.01)]
    shrunk = latency.shrink_spreads(spreads)
    assert len({s.tau for s in shrunk}) == 1
    assert shrunk[0].df == 20.0
    assert latency.shrink_spreads(spreads[:2]) == spreads[:2]


def test_bca_is_scipys():
    values = np.random.default_rng(6).exponential(1.0, 40)
    mine = latency.bca_interval(values, 0.05)
    theirs = scipy.stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, confidence_level=0.9, method="BCa", rng=np.random.default_rng(0)
    ).confidence_interval
    assert mine == pytest.approx((theirs.low, theirs.high), abs=0.02)


def test_bca_p_values_invert_its_bounds():
    found = cluster_bootstrap(np.random.default_rng(7).exponential(1.0, (60, 1)), lambda sums: sums[..., 0] / 60)
    for confidence in (0.9, 0.95, 0.99):
        assert found.p_within(found.bound(confidence)) == pytest.approx(1.0 - confidence, abs=0.005)
        assert found.p_beyond(found.bound(1.0 - confidence)) == pytest.approx(1.0 - confidence, abs=0.005)


def test_every_draw_is_of_all_clusters():
    assert (draws(17, 50).sum(axis=1) == 17).all()
    with pytest.raises(ValueError, match="alike"):
        cluster_bootstrap(np.ones((5, 1)), lambda sums: sums[..., 0])


def test_truncation_counts_the_share_of_the_crossing_pass():
    by_pass = np.array([[4, 4, 2], [3, 3, 3]])
    cut = accept.truncate(by_pass, np.array([6, 9]))
    assert cut.tokens.tolist() == [6.0, 9.0]
    assert cut.passes.tolist() == [1.5, 3.0]


def test_common_length_compares_what_both_have():
    static, candidate = accept.common_length(np.array([[4, 4, 4]]), np.array([[2, 2, 2]]))
    assert static.tokens.tolist() == candidate.tokens.tolist() == [6.0]
    assert (static.accept_length, candidate.accept_length) == (4.0, 2.0)


def test_positions_are_cochran_mantel_and_haenszel():
    random = np.random.default_rng(8)
    proposed = np.full((20, 3), 30)
    static, candidate = random.binomial(proposed, 0.8), random.binomial(proposed, 0.7)
    p, odds = accept.positions_worse_p((static, proposed), (candidate, proposed))
    tables = [
        [[static[i, j], 30 - static[i, j]], [candidate[i, j], 30 - candidate[i, j]]]
        for i in range(20)
        for j in range(3)
    ]
    theirs = StratifiedTable([np.array(t, float) for t in tables])
    assert p == pytest.approx(theirs.test_null_odds().pvalue)
    assert odds == pytest.approx(theirs.oddsratio_pooled)
    assert accept.positions_worse_p((candidate, proposed), (static, proposed))[0] == 1.0


def naive_energy(segment, n):
    """Matteson and James's scaled energy distance, from its definition."""
    x, y = segment[:n], segment[n:]
    across = np.mean([abs(a - b) for a in x for b in y])
    within = [np.mean([abs(a - b) for i, a in enumerate(s) for b in s[:i]]) for s in (x, y)]
    return len(x) * len(y) / len(segment) * (2 * across - within[0] - within[1])


def test_the_best_split_is_the_definitions():
    segment = np.random.default_rng(9).normal(size=15)
    energies = {n: naive_energy(segment, n) for n in range(3, 13)}
    value, at = history.best_split(segment)
    assert at == max(energies, key=energies.__getitem__)
    assert value == pytest.approx(energies[at])


def test_steps_are_found_and_noise_is_not():
    random = np.random.default_rng(10)
    noise = random.normal(size=60)
    assert history.find_steps(noise, 0.01) == []
    steps = history.find_steps(noise + np.r_[np.zeros(25), np.full(20, 4.0), np.full(15, -1.0)], 0.01)
    assert [step.night for step in steps] == pytest.approx([25, 45], abs=1)
    assert [step.rise > 0 for step in steps] == [True, False]


def test_cusum_run_lengths_are_the_published_ones():
    # Montgomery, Introduction to Statistical Quality Control: h = 5, k = 0.5 has one-sided run lengths 930 and 10.4
    assert history.cusum_run_length(0.0, 0.5, 5.0) == pytest.approx(930, rel=0.02)
    assert history.cusum_run_length(1.0, 0.5, 5.0) == pytest.approx(10.4, rel=0.02)
    assert history.cusum_run_length(0.5, 0.5, 5.0) == pytest.approx(6.166**2)


def test_cusum_is_the_recursion():
    assert history.creep(np.array([1.0, 3.0, 3.0]), 0.0, 1.0, slack=0.5, limit=5.0) == 2
    assert history.creep(np.array([1.0, 3.0, 0.0, 3.0]), 0.0, 1.0, slack=0.5, limit=4.9) == 3
    assert history.creep(np.array([-9.0, 3.0]), 0.0, 1.0, slack=0.5, limit=2.4) == 1  # what was better is forgotten
    assert history.creep(np.zeros(100), 0.0, 1.0) is None
