"""pass@k, votes and intervals: against enumeration, against numbers worked out by hand."""

from itertools import combinations, product
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.evaluation.estimates import interval, majority, pass_at_k


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(num_samples, data):
    rights = data.draw(st.lists(st.booleans(), min_size=num_samples, max_size=num_samples))
    k = data.draw(st.integers(1, num_samples))
    choices = [any(chosen) for chosen in combinations(rights, k)]
    assert pass_at_k(num_samples, sum(rights), k) == pytest.approx(sum(choices) / len(choices))


@given(st.integers(1, 4), st.integers(0, 10), st.integers(1, 9))
def test_pass_at_k_is_unbiased(k, extra, tenths):
    """Its mean over all outcomes of n samples is what k fresh samples would give."""
    n, p = k + extra % 4, tenths / 10
    expected = sum(
        comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1)
    )
    assert expected == pytest.approx(1 - (1 - p) ** k)


@pytest.mark.parametrize(
    ("n", "c", "k", "value"),
    [
        (4, 0, 4, 0.0),
        (4, 1, 4, 1.0),
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),  # 3 of the 6 pairs have the right one
        (4, 2, 2, 5 / 6),  # one pair of 6 has none
        (10, 3, 5, 1 - 21 / 252),
        (200, 1, 100, 0.5),
    ],
)
def test_pass_at_k_by_hand(n, c, k, value):
    assert pass_at_k(n, c, k) == pytest.approx(value, abs=1e-15)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_what_is_not_defined_is_refused(n, c, k):
    with pytest.raises(ValueError, match=f"pass@{k} of {c} right in {n}"):
        pass_at_k(n, c, k)


def test_votes_by_hand():
    assert majority([("4", True), ("5", False), ("4", True)]) == 1.0
    assert majority([("5", False), ("5", False), ("4", True)]) == 0.0
    # A tie of a right and a wrong answer is a toss-up, however many others there are.
    assert majority([("4", True), ("5", False)]) == 0.5
    assert majority([("4", True), ("5", False), ("6", False)]) == pytest.approx(1 / 3)
    # Who gave no answer does not vote, not even with others who gave none.
    assert majority([(None, False), (None, False), ("4", True)]) == 1.0
    assert majority([(None, False)]) == 0.0
    assert majority([]) == 0.0


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=6))
def test_a_vote_is_the_expectation_over_the_lot(answers):
    counts = {answer: answers.count(answer) for answer in answers}
    top = [answer for answer, count in counts.items() if count == max(counts.values())]
    expected = sum(answer == "a" for answer in top) / len(top)
    assert majority([(a, a == "a") for a in answers]) == pytest.approx(expected)


def test_equal_answers_that_are_judged_differently_count_as_often_as_they_are_right():
    assert majority([("4", True), ("4", True), ("4", False), ("5", False)]) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("share", "count", "low", "high"),
    [
        # z² = 3.841459: for p = 0, high = z² / (n + z²); for p = 1/2 the middle is 1/2 and the half
        # width z / (2 sqrt(n + z²)).
        (0.0, 10, 0.0, 0.277533),
        (1.0, 10, 0.722467, 1.0),
        (0.5, 100, 0.403832, 0.596168),
        (0.75, 4, 0.300642, 0.954413),
        (0.25, 4, 0.045587, 0.699358),
    ],
)
def test_intervals_by_hand(share, count, low, high):
    assert interval(share, count) == pytest.approx((low, high), abs=1e-6)


@given(st.floats(0, 1), st.integers(1, 10_000))
def test_an_interval_holds_its_share_and_shrinks(share, count):
    low, high = interval(share, count)
    assert 0 <= low <= share <= high <= 1
    narrow = interval(share, 4 * count)
    assert narrow.high - narrow.low < high - low


def test_an_interval_covers_the_truth_as_often_as_it_says():
    n, p = 60, 0.3
    covered = sum(
        comb(n, c) * p**c * (1 - p) ** (n - c)
        for c in range(n + 1)
        if interval(c / n, n).low <= p <= interval(c / n, n).high
    )
    assert 0.93 < covered < 0.97


def test_wins_with_ties_are_covered_at_least_as_often():
    """Three outcomes a prompt: the interval of a binomial share is wide enough for them."""
    n, win, tie = 8, 0.3, 0.4
    truth, covered = win + tie / 2, 0.0
    for outcomes in product((0.0, 0.5, 1.0), repeat=n):
        low, high = interval(sum(outcomes) / n, n)
        if low <= truth <= high:
            chance = 1.0
            for outcome in outcomes:
                chance *= {1.0: win, 0.5: tie, 0.0: 1 - win - tie}[outcome]
            covered += chance
    assert covered > 0.95


@pytest.mark.parametrize(("share", "count"), [(0.5, 0), (1.5, 3), (-0.1, 3)])
def test_there_is_no_interval_of_nothing(share, count):
    with pytest.raises(ValueError, match="has no interval"):
        interval(share, count)
