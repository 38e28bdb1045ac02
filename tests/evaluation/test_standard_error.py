"""Standard errors: over prompts, paired where two policies share them."""

import random
import statistics

import pytest

from stages.evaluation import measures
from stages.evaluation.contest import contest
from stages.standard_error import error_metric, error_name, standard_error
from tests.evaluation.cases import POLICY, REFERENCE, answer, answered


def test_by_hand():
    """Means 2 and 6 of two prompts, whose own mean is off by 2 (4 / sqrt 2, of two draws)."""
    assert standard_error([1, 3, 5, 7], ["a", "a", "b", "b"]) == pytest.approx(2.0)
    # Apart, the four responses would seem to tell more.
    assert standard_error([1, 3, 5, 7], range(4)) == pytest.approx(
        statistics.stdev([1, 3, 5, 7]) / 2
    )


def test_a_mean_over_tokens_counts_them():
    """Sums 4 and 5 of 2 and 1 tokens, mean 3: residues -2 and 2. What has no token is not drawn."""
    assert standard_error([4, 5, 0], "abc", [2, 1, 0]) == pytest.approx((2 * (4 + 4)) ** 0.5 / 3)


def test_more_samples_of_the_same_prompts_do_not_pass_for_more_prompts():
    rewards = [0.0, 1.0, 3.0, 2.0]
    once = standard_error(rewards, range(4))
    assert standard_error(rewards * 50, list(range(4)) * 50) == pytest.approx(once)


def test_one_prompt_has_no_error():
    assert standard_error([1.0, 2.0], ["a", "a"]) is None
    assert standard_error([], []) is None
    assert error_metric("reward_mean", None) == {}


def test_the_interval_holds_the_truth_as_often_as_it_says():
    """Prompts of mean 0 and spread 2, four responses each that differ by 1."""
    dice = random.Random(5)
    within, as_if_apart = 0, 0
    for _ in range(300):
        prompts = [number for number in range(40) for _ in range(4)]
        of_prompt = [dice.gauss(0, 2) for _ in range(40)]
        rewards = [of_prompt[number] + dice.gauss(0, 1) for number in prompts]
        off = abs(statistics.fmean(rewards))
        within += off < 1.96 * standard_error(rewards, prompts)
        as_if_apart += off < 1.96 * standard_error(rewards, range(160))
    assert 0.91 < within / 300 < 0.98
    assert as_if_apart / 300 < 0.8


def test_errors_of_an_evaluation_by_hand():
    """Mean rewards of the samples: 2, 1/3, 5/3, 1/3, 14/3, 0, before 2, 0, 3/2, 1/2, 16/3, 1."""
    found = contest(POLICY, REFERENCE)
    numbers = measures.against(POLICY, found)
    gains = [0, 1 / 3, 1 / 6, -1 / 6, -2 / 3, -1]
    assert numbers["reward_gain"] == pytest.approx(statistics.fmean(gains))
    assert numbers["reward_gain_error"] == pytest.approx(statistics.stdev(gains) / 6**0.5)
    by_prompt = [4.5 / 9, 6 / 9, 5 / 9, 3 / 9, 3 / 9, 0]
    assert numbers["win_rate_sampled_error"] == pytest.approx(statistics.stdev(by_prompt) / 6**0.5)
    # Wilson for 2.5 of 4, with z² = 3.841459.
    ends = [numbers[f"win_rate_similar_length_{end}"] for end in ("low", "high")]
    assert ends == pytest.approx((0.219427, 0.908101), abs=1e-6)
    right = [1 / 3, 1 / 3, 1, 1 / 3, 0]
    assert measures.quality(POLICY)["accuracy_sampled_error"] == pytest.approx(
        statistics.stdev(right) / 5**0.5
    )


def test_policies_on_the_same_prompts_are_compared_prompt_by_prompt():
    """Prompts are worth 0 to 90, and the policy gains 1 on each: a sure gain of unsure means."""
    theirs, mine = (
        [answered(str(n), answer(0.0), answer(10.0 * n + gain)) for n in range(10)]
        for gain in (0.0, 1.0)
    )
    numbers = measures.against(mine, contest(mine, theirs))
    assert (numbers["reward_gain"], numbers["reward_gain_error"]) == (1.0, 0.0)


def test_names_of_errors_keep_the_source_last():
    assert error_name("reward_mean/right") == "reward_mean_error/right"
