"""Two policies on the same prompts, by the reward of their responses.

Higher reward wins, a tie counts half. Reward models like length, so what is left of a win rate
among responses of similar length tells more than the win rate itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

from stages.evaluation.answers import Answer, Answered

SIMILAR_WITHIN = 5
"""Two lengths are similar when they differ by at most a fifth of the longer one."""


@dataclass(frozen=True)
class Contest:
    """One entry for each prompt, in the order of the prompts."""

    theirs: tuple[Answered, ...]
    """What the policy is compared with."""
    won: tuple[float, ...]
    """1, 0.5 or 0: greedy response against greedy response."""
    won_sampled: tuple[float, ...]
    """Share of wins among all pairs of a sampled response of the one and of the other."""
    is_similar: tuple[bool, ...]
    """Whether the greedy responses are of similar length."""

    @property
    def won_similar(self) -> list[float]:
        return [w for w, similar in zip(self.won, self.is_similar, strict=True) if similar]


def contest(mine: Sequence[Answered], theirs: Sequence[Answered]) -> Contest:
    """Prompt by prompt; ValueError where the two did not answer the same prompts."""
    won = greedy_outcomes(mine, theirs)
    pairs = list(zip(mine, theirs, strict=True))
    return Contest(
        theirs=tuple(theirs),
        won=won,
        won_sampled=tuple(
            fmean(outcome(a, b) for a, b in product(one.sampled, other.sampled))
            for one, other in pairs
        ),
        is_similar=tuple(
            is_similar(one.greedy.length, other.greedy.length) for one, other in pairs
        ),
    )


def greedy_outcomes(mine: Sequence[Answered], theirs: Sequence[Answered]) -> tuple[float, ...]:
    """Greedy response against greedy response, for each prompt."""
    if [item.prompt_id for item in mine] != [item.prompt_id for item in theirs]:
        raise ValueError("the two policies were evaluated on different prompts")
    return tuple(outcome(one.greedy, other.greedy) for one, other in zip(mine, theirs, strict=True))


def outcome(mine: Answer, theirs: Answer) -> float:
    """1 for the higher reward, 0 for the lower one, half for a tie.

    The same response ties with itself, though a reward model may rate it differently in the last
    digit when it stands in another batch.
    """
    same = (mine.response, mine.finish_reason) == (theirs.response, theirs.finish_reason)
    if same or mine.reward == theirs.reward:
        return 0.5
    return float(mine.reward > theirs.reward)


def is_similar(one: int, other: int) -> bool:
    return SIMILAR_WITHIN * abs(one - other) <= max(one, other)
