"""The SFT policy and the final one side by side, prompt by prompt.

Whether accuracy really changed is asked of the prompts whose outcome flipped: if chance alone
flipped them, as many would turn right as wrong. An exact sign test says how surprising that is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import comb

from stages.context import StageError
from stages.reporting.evidence import Sample

SIGNIFICANCE = 0.05


class Outcome(StrEnum):
    """What became of a prompt."""

    IMPROVED = "improved"
    REGRESSED = "regressed"
    STILL_WRONG = "still wrong"
    STILL_RIGHT = "still right"


class Verdict(StrEnum):
    """What became of the policy."""

    BETTER = "better"
    WORSE = "worse"
    UNCLEAR = "unclear"


@dataclass(frozen=True)
class Pair:
    before: Sample
    after: Sample

    @property
    def outcome(self) -> Outcome:
        if self.before.correct:
            return Outcome.STILL_RIGHT if self.after.correct else Outcome.REGRESSED
        return Outcome.IMPROVED if self.after.correct else Outcome.STILL_WRONG

    @property
    def gain(self) -> float:
        return self.after.reward - self.before.reward


def pair_up(before: Sequence[Sample], after: Sequence[Sample]) -> list[Pair]:
    """Samples of the same prompt together, in the order of the files."""
    if [sample.prompt_id for sample in before] != [sample.prompt_id for sample in after]:
        raise StageError(
            "the SFT policy and the final policy were evaluated on different prompts: "
            "run `dvc repro` so that both see the same held-out set"
        )
    return [Pair(*samples) for samples in zip(before, after, strict=True)]


def count(pairs: Sequence[Pair]) -> dict[Outcome, int]:
    """How many prompts had each outcome."""
    return {o: sum(pair.outcome is o for pair in pairs) for o in Outcome}


def judge(pairs: Sequence[Pair]) -> Verdict:
    """Better or worse only where chance is an unlikely explanation."""
    counts = count(pairs)
    up, down = counts[Outcome.IMPROVED], counts[Outcome.REGRESSED]
    flips = up + down
    tail = sum(comb(flips, k) for k in range(min(up, down) + 1))
    if 2 * tail >= SIGNIFICANCE * 2**flips:
        return Verdict.UNCLEAR
    return Verdict.BETTER if up > down else Verdict.WORSE


def choose(pairs: Sequence[Pair], limit: int) -> list[Pair]:
    """The most telling pairs: half improved, a quarter regressed, a quarter still wrong, as far as
    there are such; of three or more, at least one each.

    Room that one outcome leaves goes to the next. Within an outcome, the pairs whose reward changed
    most come first: they show what the reward asked for.
    """
    ranked = {
        outcome: sorted(
            (pair for pair in pairs if pair.outcome is outcome), key=lambda pair: -abs(pair.gain)
        )
        for outcome in Outcome
    }
    quarter = max(limit // 4, 1) if limit >= 3 else 0
    quota = {
        Outcome.IMPROVED: limit - 2 * quarter,
        Outcome.REGRESSED: quarter,
        Outcome.STILL_WRONG: quarter,
        Outcome.STILL_RIGHT: 0,
    }
    taken = {outcome: min(quota[outcome], len(ranked[outcome])) for outcome in Outcome}
    for outcome in Outcome:
        spare = limit - sum(taken.values())
        taken[outcome] += min(spare, len(ranked[outcome]) - taken[outcome])
    return [pair for outcome in Outcome for pair in ranked[outcome][: taken[outcome]]]
