"""The metrics of an evaluation.

What cannot be measured has no number: no accuracy where nothing says what is right, no win rate of
the reference itself. A prompt counts as much as any other, however many samples it has. Shares of
greedy responses have an interval, means over samples a standard error; both are over prompts.
"""

import statistics
from collections.abc import Sequence

from stages.evaluation.answers import Answered
from stages.evaluation.contest import Contest
from stages.evaluation.estimates import interval, majority, pass_at_k
from stages.standard_error import error_metric, standard_error

Numbers = dict[str, float | int]


def quality(answered: Sequence[Answered]) -> Numbers:
    """How often the policy is right: greedily, and by its samples."""
    judged = [item for item in answered if item.is_judged]
    if not judged:
        return {}
    accuracy = statistics.fmean(bool(item.greedy.correct) for item in judged)
    low, high = interval(accuracy, len(judged))
    prompts = [item.prompt_id for item in judged for _ in item.sampled]
    right = [bool(answer.correct) for item in judged for answer in item.sampled]
    return {
        "accuracy": accuracy,
        "accuracy_low": low,
        "accuracy_high": high,
        "accuracy_sampled": statistics.fmean(right),
        **error_metric("accuracy_sampled", standard_error(right, prompts)),
    }


def by_chances(answered: Sequence[Answered], ks: Sequence[int]) -> Numbers:
    """pass@k for each k."""
    judged = [item for item in answered if item.is_judged]
    return {
        f"pass_at_{k}": statistics.fmean(
            pass_at_k(len(item.sampled), item.num_right, k) for item in judged
        )
        for k in ks
        if judged
    }


def by_vote(answered: Sequence[Answered]) -> Numbers:
    """How often the majority of all samples is right."""
    shares = [
        majority([(answer.vote, bool(answer.correct)) for answer in item.sampled])
        for item in answered
        if item.is_judged
    ]
    return {"majority_vote": statistics.fmean(shares)} if shares else {}


def against(answered: Sequence[Answered], contest: Contest) -> Numbers:
    """How often the policy's reward is higher than the other's, and whether length explains it."""
    prompts = [item.prompt_id for item in answered]
    pairs = zip(answered, contest.theirs, strict=True)
    gains = [_mean_reward(mine) - _mean_reward(other) for mine, other in pairs]
    numbers: Numbers = {
        **win_rate(contest.won),
        "win_rate_sampled": statistics.fmean(contest.won_sampled),
        **error_metric("win_rate_sampled", standard_error(contest.won_sampled, prompts)),
        "reward_gain": statistics.fmean(gains),
        **error_metric("reward_gain", standard_error(gains, prompts)),
        "similar_length_share": statistics.fmean(contest.is_similar),
        "greedy_length": statistics.fmean(item.greedy.length for item in answered),
        "reference_greedy_length": statistics.fmean(item.greedy.length for item in contest.theirs),
    }
    if contest.won_similar:
        numbers |= win_rate(contest.won_similar, "win_rate_similar_length")
    return numbers


def win_rate(won: Sequence[float], name: str = "win_rate") -> Numbers:
    """Of greedy responses."""
    rate = statistics.fmean(won)
    low, high = interval(rate, len(won))
    return {name: rate, f"{name}_low": low, f"{name}_high": high}


def _mean_reward(item: Answered) -> float:
    return statistics.fmean(answer.reward for answer in item.sampled)
