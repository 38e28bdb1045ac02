"""The SFT policy and the final one side by side, prompt by prompt.

Whether accuracy really changed is asked of the prompts whose outcome flipped: if chance alone
flipped them, as many would turn right as wrong. An exact sign test says how surprising that is.
Where nothing says what is right, the same is asked of the prompts whose reward changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import comb

from stages.context import StageError
from stages.evaluation import contest
from stages.evaluation.answers import Answered
from stages.standard_error import standard_error

SIGNIFICANCE = 0.05


class Outcome(StrEnum):
    """The outcome of a prompt: its response before and after."""

    IMPROVED = "improved"
    REGRESSED = "regressed"
    STILL_WRONG = "still wrong"
    STILL_RIGHT = "still right"
    HIGHER = "higher reward"
    LOWER = "lower reward"
    SAME = "same reward"

    @property
    def is_judged(self) -> bool:
        """Whether something said what is right; else only rewards were compared."""
        return self not in (Outcome.HIGHER, Outcome.LOWER, Outcome.SAME)


class PolicyOutcome(StrEnum):
    """Whether the policy got better."""

    BETTER = "better"
    WORSE = "worse"
    UNCLEAR = "unclear"


@dataclass(frozen=True)
class BeforeAfter:
    before: Answered
    after: Answered

    @property
    def won(self) -> float:
        """1 for the higher reward, half for a tie."""
        return contest.outcome(self.after.greedy, self.before.greedy)

    @property
    def outcome(self) -> Outcome:
        if not (self.before.is_judged and self.after.is_judged):
            return {1.0: Outcome.HIGHER, 0.0: Outcome.LOWER, 0.5: Outcome.SAME}[self.won]
        if self.before.greedy.correct:
            return Outcome.STILL_RIGHT if self.after.greedy.correct else Outcome.REGRESSED
        return Outcome.IMPROVED if self.after.greedy.correct else Outcome.STILL_WRONG

    @property
    def gain(self) -> float:
        return self.after.greedy.reward - self.before.greedy.reward


def pair_up(before: Sequence[Answered], after: Sequence[Answered]) -> list[BeforeAfter]:
    """Answers to the same prompt together, in the order of the files."""
    if [sample.prompt_id for sample in before] != [sample.prompt_id for sample in after]:
        raise StageError(
            "the SFT policy and the final policy were evaluated on different prompts: "
            "run `dvc repro` so that both see the same held-out set"
        )
    return [BeforeAfter(*samples) for samples in zip(before, after, strict=True)]


def count(pairs: Sequence[BeforeAfter]) -> dict[Outcome, int]:
    """How many prompts had each outcome, of the kinds that were possible."""
    outcomes = [pair.outcome for pair in pairs]
    kinds = {outcome.is_judged for outcome in outcomes} or {True}
    return {o: outcomes.count(o) for o in Outcome if o.is_judged in kinds}


def judge(pairs: Sequence[BeforeAfter]) -> PolicyOutcome:
    """Better or worse only where chance is an unlikely explanation."""
    counts = count(pairs)
    better, worse = (
        (Outcome.IMPROVED, Outcome.REGRESSED)
        if Outcome.IMPROVED in counts
        else (Outcome.HIGHER, Outcome.LOWER)
    )
    up, down = counts[better], counts[worse]
    flips = up + down
    tail = sum(comb(flips, k) for k in range(min(up, down) + 1))
    if 2 * tail >= SIGNIFICANCE * 2**flips:
        return PolicyOutcome.UNCLEAR
    return PolicyOutcome.BETTER if up > down else PolicyOutcome.WORSE


def accuracy_gain_error(pairs: Sequence[BeforeAfter]) -> float | None:
    """The standard error of the difference of the two accuracies, prompt by prompt."""
    judged = [pair for pair in pairs if pair.before.is_judged and pair.after.is_judged]
    gains = [bool(pair.after.greedy.correct) - bool(pair.before.greedy.correct) for pair in judged]
    return standard_error(gains, [pair.before.prompt_id for pair in judged])


def choose(pairs: Sequence[BeforeAfter], limit: int) -> list[BeforeAfter]:
    """The most telling pairs: half improved, a quarter regressed, a quarter still wrong, as far as
    there are such; of three or more, at least one each. Of prompts that nobody can judge: half with
    a higher reward, a quarter with a lower one, a quarter with the same.

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
    by_rank = (
        (Outcome.IMPROVED, Outcome.REGRESSED, Outcome.STILL_WRONG)
        if any(ranked[outcome] for outcome in Outcome if outcome.is_judged)
        else (Outcome.HIGHER, Outcome.LOWER, Outcome.SAME)
    )
    wanted = dict(zip(by_rank, (limit - 2 * quarter, quarter, quarter), strict=True))
    quota = {outcome: wanted.get(outcome, 0) for outcome in Outcome}
    taken = {outcome: min(quota[outcome], len(ranked[outcome])) for outcome in Outcome}
    for outcome in Outcome:
        spare = limit - sum(taken.values())
        taken[outcome] += min(spare, len(ranked[outcome]) - taken[outcome])
    return [pair for outcome in Outcome for pair in ranked[outcome][: taken[outcome]]]


def extremes(
    pairs: Sequence[BeforeAfter], limit: int
) -> tuple[list[BeforeAfter], list[BeforeAfter]]:
    """The pairs whose reward rose most, and those whose reward fell most; each the largest first.

    A response that did not change has not gained, whatever rounding says.
    """
    ranked = sorted(pairs, key=lambda pair: -pair.gain)
    rose = [pair for pair in ranked if pair.won == 1.0][:limit]
    fell = [pair for pair in reversed(ranked) if pair.won == 0.0][:limit]
    return rose, fell
