"""Estimates from a few samples per prompt, with intervals. All in closed form.

Every share here is a mean over prompts of something between 0 and 1. Among all such variables with
the same mean, one that is only ever 0 or 1 varies most, so the interval of a binomial share holds
for each of them: for wins where a tie counts half it is, if anything, a little too wide.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

Z_95 = 1.959963984540054
"""Standard deviations either side of the mean that hold 95% of a normal distribution."""


class Interval(NamedTuple):
    low: float
    high: float


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Probability that of k samples at least one is right, given that so many of n were.

    Unbiased: of all ways to choose k of the n, the share that does not miss every right one.
    """
    if not 0 <= num_right <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_right} right in {num_samples} samples is not defined")
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority(votes: Sequence[tuple[Hashable | None, bool]]) -> float:
    """Probability that the answer given most often is right, where a tie is settled by lot.

    A vote is an answer and whether it is right; one without an answer abstains, and where all do
    the outcome is wrong. Equal answers that were judged differently count as their mean.
    """
    judged: dict[Hashable, list[bool]] = defaultdict(list)
    for answer, right in votes:
        if answer is not None:
            judged[answer].append(right)
    if not judged:
        return 0.0
    most = max(map(len, judged.values()))
    winners = [rights for rights in judged.values() if len(rights) == most]
    return sum(map(sum, winners)) / (most * len(winners))


def interval(share: float, count: int) -> Interval:
    """The 95% interval of a share over `count` prompts: Wilson's, which stays between 0 and 1."""
    if count < 1 or not 0 <= share <= 1:
        raise ValueError(f"a share of {share} over {count} prompts has no interval")
    spread = Z_95**2 / count
    middle = (share + spread / 2) / (1 + spread)
    half = Z_95 * math.sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    # Rounding must not put the interval of a sure thing beside it.
    return Interval(min(max(0.0, middle - half), share), max(min(1.0, middle + half), share))
