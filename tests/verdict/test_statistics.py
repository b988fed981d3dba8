"""Statistics by hand, by brute force, and by what must not change them."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from kinfed import UsageError
from kinfed.verdict.statistics import (
    compare_pairs,
    critical_difference,
    first_reaching,
    holm,
    interval,
    kendall,
    mean_ranks,
    midranks,
    not_apart,
    signed_ranks,
    student,
    tails,
)


def test_the_interval_over_seeds_by_hand():
    """Means 0.55, 0.65 and 0.75: deviation 0.1, t(2) at 97.5 % is 4.302653."""
    found = interval([[0.5, 0.6], [0.6, 0.7], [0.7, 0.8]])
    half = 4.302652730 * 0.1 / math.sqrt(3)
    assert (found.over, found.why) == ("seeds", "")
    assert (found.mean, found.low, found.high) == pytest.approx((0.65, 0.65 - half, 0.65 + half))


def test_the_interval_of_one_seed_is_over_clients_and_always_the_same():
    scores = np.random.default_rng(1).normal(0.7, 0.1, 400)
    found = interval(scores)
    assert found == interval([*scores, math.nan]) == interval(scores[None])
    assert (found.over, found.mean) == ("clients", pytest.approx(scores.mean()))
    # Of many clients whose scores are normal the bootstrap comes close to Student's interval.
    half = 1.966 * scores.std(ddof=1) / 20
    assert (found.low, found.high) == pytest.approx((found.mean - half, found.mean + half), abs=0.1 * half)
    skewed = interval(np.exp(np.random.default_rng(2).normal(0, 1, 30)))
    assert skewed.high - skewed.mean > skewed.mean - skewed.low  # it follows the skew


def test_the_bootstrap_of_three_clients_against_all_27_resamples():
    """Percentiles 2.5 and 97.5 are the means of the two extreme resamples, whose share is 1/27; BCa moves neither."""
    means = sorted(np.mean(one) for one in itertools.product([0.1, 0.2, 0.3], repeat=3))
    found = interval([0.1, 0.2, 0.3])
    assert (found.low, found.high) == pytest.approx((means[0], means[-1]))


@pytest.mark.parametrize(
    ("scores", "over", "why"),
    [
        ([0.5], "clients", "one client and one seed"),
        ([0.5, math.nan], "clients", "one client and one seed"),
        ([0.7, 0.7, 0.7], "clients", "all clients have the same score"),
        ([[0.5, 0.7], [0.7, 0.5]], "seeds", "all seeds have the same score"),
    ],
)
def test_where_there_is_no_interval_it_says_why(scores, over, why):
    found = interval(scores)
    assert (found.over, found.why) == (over, why)
    assert math.isfinite(found.mean)
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_scores_without_a_number_are_refused():
    with pytest.raises(UsageError, match="with a number for each seed"):
        interval([[0.5, 0.6], [math.nan, math.nan]])
    with pytest.raises(UsageError, match="cannot be paired"):
        compare_pairs([0.5, math.nan], [math.nan, 0.5], True)
    with pytest.raises(UsageError, match=r"\[1, 2\] and \[1, 3\]"):
        compare_pairs([0.5, 0.6], [0.5, 0.6, 0.7], True)
    with pytest.raises(UsageError, match="got 1 NaN"):
        mean_ranks([[0.5, math.nan], [0.4, 0.3]])


@pytest.mark.parametrize("n", [5, 9, 13, 50, 51, 300])
def test_signed_ranks_are_scipys(n):
    """Both count all signs of up to 50 differences, scipy with ties those of up to 13; of more both approximate."""
    gain = np.random.default_rng(n).normal(0.1, 1, n)
    for values in [gain, gain.round(1)][: 1 if n == 50 else 2]:
        values = values[values != 0]
        expected = [stats.wilcoxon(values, correction=True, alternative=which).pvalue for which in ("greater", "less")]
        assert signed_ranks([0.0, *values, 0.0]) == pytest.approx(expected, rel=1e-9)


def test_few_signed_ranks_by_hand():
    """Ranks 1.5, 1.5 and 3: the sum 4.5 of the positive ones, or more, is reached by 3 of 8 choices of signs."""
    assert signed_ranks([-1, 1, 2]) == (3 / 8, 7 / 8)
    assert midranks([5, 1, 5, 2]).tolist() == [3.5, 1, 3.5, 2]


def test_quantiles_and_bootstrap_are_scipys():
    assert [student(freedom) for freedom in (1, 7, 500)] == pytest.approx(stats.t.ppf(0.975, [1, 7, 500]))
    scores = np.random.default_rng(5).beta(8, 2, 40)
    unit = scores.max()
    draw = np.random.default_rng(0)
    found = stats.bootstrap((scores / unit,), np.mean, n_resamples=9999, batch=1000, rng=draw).confidence_interval
    assert interval(scores)[1:3] == pytest.approx((unit * found.low, unit * found.high), rel=1e-9)


def test_pairs_by_hand():
    """Differences 1, 2, 3, 4, 5 and -6 hundredths: the signs with a rank sum of 6 or less are 14 of 64."""
    others = np.full(6, 0.5)
    found = compare_pairs(others + np.array([0.01, 0.02, 0.03, 0.04, 0.05, -0.06]), others, True)
    assert found.p == pytest.approx(2 * 14 / 64)
    assert (found.mean, found.clients, found.worse, found.ahead, found.seeds) == (
        pytest.approx(0.015),
        6,
        pytest.approx(1 / 6),
        1,
        1,
    )
    half = 2.570581836 * np.std([1, 2, 3, 4, 5, -6], ddof=1) / 100 / math.sqrt(6)
    assert (found.low, found.high) == pytest.approx((0.015 - half, 0.015 + half))


def test_equal_differences_are_ties_although_their_last_bits_differ():
    """As float32 has them: 0.8 - 0.7 and 0.3 - 0.2 are one difference, and 0.1 + 0.2 - 0.3 is none."""
    mine = np.float32([0.8, 0.3, 0.5, 0.9]).astype(float)
    others = np.float32([0.7, 0.2, 0.6, 0.9]).astype(float) + np.array([0, 0, 0, 1e-16])
    found = compare_pairs(mine, others, True)
    assert (found.differ, found.p) == (3, 1.0)


def test_a_client_counts_once_however_many_seeds_there_are():
    a, b = np.array([0.6, 0.7, 0.9, 0.8]), np.array([0.5, 0.5, 0.6, 0.9])
    once, thrice = compare_pairs(a, b, True), compare_pairs(np.tile(a, (3, 1)), np.tile(b, (3, 1)), True)
    assert thrice[:6] == pytest.approx(once[:6])
    assert (once.ahead, once.seeds, thrice.ahead, thrice.seeds) == (1, 1, 3, 3)
    # A client without a score with one seed has the mean of the others.
    some = compare_pairs([a, [*a[:3], math.nan]], [b, b], True)
    assert some[:6] == pytest.approx(once[:6])


def test_pairs_know_no_order_of_clients_unit_or_direction():
    draws = np.random.default_rng(3)
    a, b = draws.random((2, 20)), draws.random((2, 20))
    found, order = compare_pairs(a, b, True), draws.permutation(20)
    assert compare_pairs(a[:, order], b[:, order], True) == pytest.approx(found)
    back = compare_pairs(b, a, True)
    assert (back.mean, back.low, back.high, back.p) == pytest.approx((-found.mean, -found.high, -found.low, found.p))
    assert compare_pairs(a, b, False)[:4] == pytest.approx(back[:4])
    large = compare_pairs(1000 * a, 1000 * b, True)
    assert (large.mean, large.p) == pytest.approx((1000 * found.mean, found.p))


def test_many_tied_clients_have_the_normal_approximation():
    """60 differences of one size, 40 positive: ranks 30.5, sum 1220, mean 915, deviation 30.5 * sqrt(60) / 2."""
    found = compare_pairs(0.5 + np.repeat([0.1, -0.1], [40, 20]), np.full(60, 0.5), True)
    z = (1220 - 915 - 0.5) / (30.5 * math.sqrt(60) / 2)
    assert (found.exact, found.p) == (False, pytest.approx(math.erfc(z / math.sqrt(2))))
    few = compare_pairs(
        0.5 + np.repeat([0.1, -0.1], [28, 12]), np.full(40, 0.5), True
    )  # of these: 28 or more of 40 heads
    assert (few.exact, few.p) == (True, pytest.approx(2 * sum(math.comb(40, k) for k in range(28, 41)) / 2**40))


def test_where_the_test_is_not_defined_it_says_why():
    assert compare_pairs([0.5], [0.4], True).why == "one client"
    same = compare_pairs([0.5, 0.6], [0.5, 0.6], True)
    assert (same.why, same.mean, same.worse, same.differ) == ("all differences are zero", 0, 0, 0)
    assert math.isnan(same.p)
    assert math.isnan(same.low)


@pytest.mark.parametrize("unit", [1e-13, 1e300], ids=["tiny", "huge"])
@pytest.mark.filterwarnings("error")
def test_a_bounds_share_of_the_scores_knows_no_unit(unit):
    for scores in ([1.0, 2.0, 3.0], [[1.0, 2.0], [2.0, 4.0]], np.arange(1001.0)):
        found, plain = interval(unit * np.array(scores)), interval(scores)
        assert (found.mean, found.low, found.high) == pytest.approx(tuple(unit * x for x in plain[:3]))
        assert plain.why == found.why == ""
    scores = np.array([1.0, -2.0, 3.0, 5.0])
    found, plain = compare_pairs(unit * scores, unit * scores[::-1], True), compare_pairs(scores, scores[::-1], True)
    assert found[1:4] == pytest.approx((unit * plain.low, unit * plain.high, plain.p))


@pytest.mark.filterwarnings("error")
def test_a_bound_that_is_not_defined_says_why():
    for scores in ([math.inf, 1.0, 2.0], [[math.inf, -math.inf], [0.0, 1.0]]):
        assert interval(scores).why == "a score is infinite"
    for one in (0.5, 1 - 1.1e-9):  # scores of which a third of the resamples have no spread
        found = interval([1.0] * 998 + [one])
        assert (found.low < found.mean < found.high, found.why) == (True, "")
    same = compare_pairs([0.5, 0.6, 0.7], [0.4, 0.5, 0.6], True)
    assert (same.why, same.mean, same.p) == ("all differences are equal", pytest.approx(0.1), pytest.approx(0.25))
    assert math.isnan(same.low)
    lost = compare_pairs(
        [math.inf, 1.0, math.inf], [0.5, 1.5, math.inf], False
    )  # losses: one run has diverged at a client
    assert (lost.why, lost.mean, lost.clients, lost.worse) == ("a score is infinite", -math.inf, 3, 1 / 3)
    assert math.isnan(lost.p)


def test_a_mean_difference_that_is_rounding_alone_is_zero():
    """-0.1 + 0.2 - 0.1, whose mean is -3.7e-17."""
    assert str(compare_pairs([0.8, 0.9, 0.7], [0.9, 0.7, 0.8], True).mean) == "0.0"
    assert compare_pairs([0.123456789, 0.5], [0.1, 0.5], True).mean == pytest.approx(0.0117283945, rel=1e-12)


def test_scores_that_are_no_difference_to_pairs_share_a_rank():
    assert mean_ranks([[0.1 + 0.2, 0.3, 0.2], [0.7, np.float32(0.7), 0.6]]).mean == pytest.approx([1.5, 1.5, 3])
    assert mean_ranks([[3e-9, 2e-9], [0.0, 0.0]]).mean == pytest.approx([1.25, 1.75])
    assert mean_ranks([[math.inf, 1.0], [2.0, 1.0]], False).mean == pytest.approx([2, 1])


def test_holm_by_hand_and_as_a_closed_test():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == pytest.approx([1, 1])
    assert holm([math.nan, 0.02, 0.5])[1:] == pytest.approx([0.04, 0.5])
    assert math.isnan(holm([math.nan, 0.02])[0])
    p = np.random.default_rng(4).random(5) ** 3
    closed = [
        max(
            min(1, len(others) * min(p[list(others)]))
            for size in range(1, 6)
            for others in itertools.combinations(range(5), size)
            if i in others
        )
        for i in range(5)
    ]
    assert holm(p) == pytest.approx(closed)


def test_critical_differences_as_printed():
    """Demšar 2006, table 5a, and his example: four methods, 14 data sets, 1.25 at alpha 0.05 and 1.12 at 0.10."""
    table = [1.960, 2.343, 2.569, 2.728, 2.850, 2.949, 3.031, 3.102, 3.164]
    found = [critical_difference(k, 1) / math.sqrt(k * (k + 1) / 6) for k in range(2, 11)]
    assert found == pytest.approx(table, abs=0.001)
    assert critical_difference(4, 14) == pytest.approx(1.25, abs=0.005)
    assert critical_difference(4, 14, level=0.9) == pytest.approx(1.12, abs=0.005)


def test_mean_ranks_and_friedman_by_hand():
    """Ranks 1 2 3, 1 2 3 and 2 1 3: means 4/3, 5/3, 3; chi2 = 12 * 3 / 12 * (sum of squares - 12) = 14/3."""
    scores = [[0.9, 0.8, 0.7], [0.5, 0.4, 0.3], [0.6, 0.7, 0.1]]
    found = mean_ranks(scores)
    assert found.mean == pytest.approx([4 / 3, 5 / 3, 3])
    assert found.p == pytest.approx(math.exp(-(14 / 3) / 2))  # chi-squared with two degrees of freedom
    assert found.critical == pytest.approx(2.343 * math.sqrt(12 / 18), abs=0.001)
    # Errors are ranked the other way; a column's scale does not matter; equal scores share a rank.
    mixed = np.array(scores) * [[1], [-100], [1]]
    assert mean_ranks(mixed, [True, False, True]).mean == pytest.approx(found.mean)
    assert mean_ranks([[0.5, 0.5, 0.1], [0.2, 0.2, 0.1]]).mean == pytest.approx([1.5, 1.5, 3])


@pytest.mark.parametrize(
    ("scores", "why"),
    [
        ([[0.5, 0.6, 0.7]], "one column is no ranking over several"),
        ([[0.5], [0.6]], "one method is no ranking over several"),
        ([[0.5, 0.6], [0.6, 0.5]], "Friedman's test needs three methods"),
        ([[0.5, 0.5, 0.5], [0.6, 0.6, 0.6]], "all methods score the same on every column"),
    ],
)
def test_ranks_that_say_little_say_so(scores, why):
    found = mean_ranks(scores)
    assert found.why == why
    assert math.isnan(found.p)
    assert found.mean.sum() == pytest.approx(sum(range(1, len(scores[0]) + 1)))


def test_groups_that_do_not_differ():
    ranks = [3.1, 1.0, 2.0, 4.6, 1.4]
    assert not_apart(ranks, 1.25) == [(1, 4, 2), (2, 0)]
    assert not_apart(ranks, 10) == [(1, 4, 2, 0, 3)]
    assert not_apart(ranks, 0.1) == []
    assert not_apart([2.0, 2.0], 0.0) == [(0, 1)]


def test_kendall_by_hand_and_over_all_pairs():
    assert kendall([3, 2, 1], [30, 20, 10]) == 1
    assert kendall([1, 2, 3], [30, 20, 10]) == -1
    assert kendall([3, 2, 1, 9], [30, 10, 20, math.nan]) == pytest.approx(1 / 3)
    draws = np.random.default_rng(5)
    a, b = draws.integers(0, 4, 9), draws.integers(0, 4, 9)
    pairs = [(np.sign(a[i] - a[j]), np.sign(b[i] - b[j])) for i, j in itertools.combinations(range(9), 2)]
    ups = sum(x * y for x, y in pairs)
    assert kendall(a, b) == pytest.approx(ups / math.sqrt(sum(x * x for x, _ in pairs) * sum(y * y for _, y in pairs)))
    for nothing in ([1, math.nan], [5, 5]), ([1, 2], [5, 5]):
        assert math.isnan(kendall(*nothing))


def test_deciles_of_clients():
    scores = np.arange(20) / 20
    assert tails(scores, True) == pytest.approx((0.025, 0.925))
    assert tails(scores, False) == pytest.approx((0.925, 0.025))
    assert tails([[0.1, 0.9], [0.3, 0.5]], True) == pytest.approx((0.2, 0.7))  # one client at least; means over seeds
    assert tails(np.arange(30) / 30, True)[0] == pytest.approx(1 / 30)  # three clients, though 30 * 0.1 is above 3


def test_the_first_that_reaches_a_target():
    assert first_reaching([0.5, 0.8, 0.7, 0.9], 0.8, True) == 1
    assert first_reaching([0.5, math.nan, 0.3], 0.3, False) == 2
    assert first_reaching([0.5, 0.6], 0.8, True) is None
