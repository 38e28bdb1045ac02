"""Two policies prompt by prompt: who wins, and which samples changed sides.

Everything here is of the prompts that both answered, and paired: the error of a difference is that
of the differences. Where nothing says what is right, a sample changes sides by its reward. Rewards
that were given by different sources are not compared, nor is correctness that was judged by them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stages.evaluation.answers import Answer, Answered


@dataclass(frozen=True)
class Response:
    response: str
    correct: bool | None
    reward: float
    length: int
    finish_reason: str


@dataclass(frozen=True)
class ChangedSample:
    """A held-out prompt whose greedy response is on another side than before."""

    prompt_id: str
    prompt: str
    answer: str | None
    task: str | None
    outcome: str
    """improved or regressed; where nothing is judged: higher reward or lower reward."""
    old: Response
    new: Response


@dataclass(frozen=True)
class Pair:
    """The second side against the first."""

    old: int
    new: int
    """Which sides, by their number."""
    num_prompts: int
    only_in_old: int
    only_in_new: int
    numbers: dict[str, float]
    """win_rate and reward_gain with their kin, as an evaluation has them; accuracy_gain."""
    outcome: str | None
    """better, worse or unclear: whether chance alone would explain it."""
    counts: dict[str, int]
    """How many prompts had each outcome."""
    changed: tuple[ChangedSample, ...]
    """The largest change of reward first, those that got better before those that got worse."""

    def as_json(self, limit: int | None = None) -> dict[str, Any]:
        shown = asdict(self)
        return {**shown, "num_changed": len(self.changed), "changed": shown["changed"][:limit]}


def pair_up(
    old: int,
    new: int,
    before: "Sequence[Answered]",
    after: "Sequence[Answered]",
    *,
    same_reward: bool = True,
    same_judge: bool = True,
) -> Pair:
    """Two policies' answers; those to prompts of one alone are only counted."""
    from stages.evaluation.contest import contest
    from stages.evaluation.measures import against
    from stages.reporting import comparison
    from stages.standard_error import error_metric

    shared = {item.prompt_id for item in before} & {item.prompt_id for item in after}
    mine = sorted((i for i in after if i.prompt_id in shared), key=_by_prompt)
    theirs = sorted((i for i in before if i.prompt_id in shared), key=_by_prompt)
    lacking = (len(before) - len(theirs), len(after) - len(mine))
    if not shared:
        return Pair(old, new, 0, *lacking, {}, None, {}, ())
    if not same_judge:
        mine, theirs = _unjudged(mine), _unjudged(theirs)
    pairs = comparison.pair_up(theirs, mine)
    numbers: dict[str, float] = dict(against(mine, contest(mine, theirs))) if same_reward else {}
    judged = [pair for pair in pairs if pair.outcome.is_judged]
    if not same_reward:
        pairs = judged
    if judged:
        right = [
            sum(bool(p.greedy.correct) for p in side)
            for side in zip(*((pair.before, pair.after) for pair in judged), strict=True)
        ]
        numbers["accuracy_gain"] = (right[1] - right[0]) / len(judged)
        numbers |= error_metric("accuracy_gain", comparison.accuracy_gain_error(pairs))
    if not pairs:
        return Pair(old, new, len(shared), *lacking, {}, None, {}, ())
    kinds = (
        (comparison.Outcome.IMPROVED, comparison.Outcome.REGRESSED)
        if judged
        else (comparison.Outcome.HIGHER, comparison.Outcome.LOWER)
    )
    changed = [
        pair
        for kind in kinds
        for pair in sorted(pairs, key=lambda pair: -abs(pair.gain))
        if pair.outcome is kind
    ]
    return Pair(
        old,
        new,
        len(shared),
        *lacking,
        numbers,
        comparison.judge(pairs).value,
        {outcome.value: number for outcome, number in comparison.count(pairs).items()},
        tuple(
            ChangedSample(
                pair.after.prompt_id,
                pair.after.prompt,
                pair.after.answer,
                pair.after.task,
                pair.outcome.value,
                _response(pair.before.greedy),
                _response(pair.after.greedy),
            )
            for pair in changed
        ),
    )


def _unjudged(answered: "Iterable[Answered]") -> "list[Answered]":
    return [replace(item, greedy=replace(item.greedy, correct=None)) for item in answered]


def _by_prompt(item: "Answered") -> str:
    return item.prompt_id


def _response(answer: "Answer") -> Response:
    return Response(
        answer.response, answer.correct, answer.reward, answer.length, answer.finish_reason
    )
