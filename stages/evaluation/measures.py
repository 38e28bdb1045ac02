"""The numbers of an evaluation under the names that are published.

What cannot be measured has no number: no accuracy where nothing says what is right, no win rate of
the reference itself. A prompt counts as much as any other, however many samples it has.
"""

import statistics
from collections.abc import Sequence

from stages.evaluation.answers import Answered
from stages.evaluation.contest import Contest
from stages.evaluation.estimates import interval, majority, mean, pass_at_k

Numbers = dict[str, float | int]


def quality(answered: Sequence[Answered]) -> Numbers:
    """How often the policy is right: greedily, and by its samples."""
    judged = [item for item in answered if item.is_judged]
    if not judged:
        return {}
    accuracy = statistics.fmean(bool(item.greedy.correct) for item in judged)
    low, high = interval(accuracy, len(judged))
    return {
        "accuracy": accuracy,
        "accuracy_low": low,
        "accuracy_high": high,
        "accuracy_sampled": statistics.fmean(
            bool(answer.correct) for item in judged for answer in item.sampled
        ),
    }


def by_chances(answered: Sequence[Answered], ks: Sequence[int]) -> Numbers:
    """pass@k for each k."""
    judged = [item for item in answered if item.is_judged]
    if not judged:
        return {}
    return {
        f"pass_at_{k}": statistics.fmean(
            pass_at_k(len(item.sampled), item.num_right, k) for item in judged
        )
        for k in ks
    }


def by_vote(answered: Sequence[Answered]) -> Numbers:
    """How often the majority of all samples is right."""
    judged = [item for item in answered if item.is_judged]
    if not judged:
        return {}
    votes = ([(answer.vote, bool(answer.correct)) for answer in item.sampled] for item in judged)
    return {"majority_vote": statistics.fmean(map(majority, votes))}


def against(answered: Sequence[Answered], contest: Contest) -> Numbers:
    """How often the policy's reward is higher than the other's, and whether length explains it."""
    numbers: Numbers = {
        **win_rate(contest.won),
        "win_rate_sampled": statistics.fmean(contest.won_sampled),
        "similar_length_share": statistics.fmean(contest.is_similar),
        "greedy_length": statistics.fmean(item.greedy.length for item in answered),
        "reference_greedy_length": statistics.fmean(item.greedy.length for item in contest.theirs),
    }
    similar = mean(contest.won_similar)
    if similar is not None:
        numbers["win_rate_similar_length"] = similar
    return numbers


def win_rate(won: Sequence[float]) -> Numbers:
    """Of greedy responses."""
    rate = statistics.fmean(won)
    low, high = interval(rate, len(won))
    return {"win_rate": rate, "win_rate_low": low, "win_rate_high": high}
