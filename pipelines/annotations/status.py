"""`lockstep annotate status`: how much is judged, by whom, and who agrees with whom.

People are compared with one another, with each source of rewards that was recorded of what they
judged, and policies by how often people preferred their responses.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipelines.annotations import agreement, store
from pipelines.annotations.agreement import Cohen, Fleiss
from pipelines.annotations.judgement import Choice, Judgement
from pipelines.annotations.outcome import Outcome, outcomes, ratings
from pipelines.annotations.queue import read_queue


@dataclass(frozen=True)
class Annotator:
    """One person's share."""

    name: str
    num_judged: int
    num_ties: int
    num_skips: int
    left_share: float | None
    """Of the judgements that prefer a side; far from a half, sides and not texts were judged."""


@dataclass(frozen=True)
class Source:
    """A source of rewards beside the majority of people."""

    name: str
    num_pairs: int
    """That people did not tie, with rewards of this source on both sides."""
    num_agreeing: int
    num_tied: int
    """That the source ties."""


@dataclass(frozen=True)
class Contest:
    """Two policies, by what people prefer."""

    one: str
    other: str
    num_pairs: int
    wins: float
    """Of `one`; a tie is half a win."""


@dataclass(frozen=True)
class AnnotationStatus:
    num_pairs: int
    """In the queue."""
    num_done: int
    """By as many people as they ask for."""
    num_begun: int
    """By fewer."""
    num_withdrawn: int
    annotators: tuple[Annotator, ...]
    fleiss: Fleiss
    cohens: tuple[Cohen, ...]
    num_ties: int
    """Of all pairs with an opinion, by majority."""
    num_judged: int
    """Pairs with an opinion, those of chats included."""
    sources: tuple[Source, ...]
    policies: tuple[Contest, ...]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def annotation_status(root: Path) -> AnnotationStatus:
    """The state of a clone's annotations."""
    notes: list[str] = []
    said, pairs = store.read(root), read_queue(root, notes)
    found = outcomes(said.judgements)
    opinions = {outcome.pair: len(outcome.judgements) for outcome in found}
    done = sum(opinions.get(pair.id, 0) >= pair.num_annotators for pair in pairs.values())
    rated = ratings(found)
    return AnnotationStatus(
        num_pairs=len(pairs),
        num_done=done,
        num_begun=sum(pair_id in opinions for pair_id in pairs) - done,
        num_withdrawn=said.num_withdrawn,
        annotators=_annotators(said.judgements),
        fleiss=agreement.fleiss(rated),
        cohens=tuple(agreement.cohens(rated)),
        num_ties=sum(outcome.preferred is None for outcome in found),
        num_judged=len(found),
        sources=_sources(found),
        policies=_policies(found),
        notes=(*said.notes, *notes),
    )


def _annotators(judgements: Iterable[Judgement]) -> tuple[Annotator, ...]:
    chosen: dict[str, Counter[Choice]] = defaultdict(Counter)
    for judgement in judgements:
        chosen[judgement.annotator][judgement.chosen] += 1
    return tuple(
        Annotator(
            name,
            counts.total() - counts[Choice.SKIP],
            counts[Choice.TIE],
            counts[Choice.SKIP],
            counts[Choice.LEFT] / sided if (sided := _sided(counts)) else None,
        )
        for name, counts in sorted(chosen.items())
    )


def _sided(counts: Counter[Choice]) -> int:
    return counts[Choice.LEFT] + counts[Choice.RIGHT]


def _sources(found: Iterable[Outcome]) -> tuple[Source, ...]:
    gaps: dict[str, list[float]] = defaultdict(list)
    for outcome in found:
        if outcome.preferred is not None:
            better, worse = outcome.preferred
            for source in sorted(better.rewards.keys() & worse.rewards.keys()):
                gaps[source].append(better.rewards[source] - worse.rewards[source])
    return tuple(
        Source(name, len(of), sum(gap > 0 for gap in of), sum(gap == 0 for gap in of))
        for name, of in sorted(gaps.items())
    )


def _policies(found: Iterable[Outcome]) -> tuple[Contest, ...]:
    wins: dict[tuple[str, str], list[float]] = defaultdict(list)
    for outcome in found:
        policies = sorted({response.policy for response in outcome.responses})
        if len(policies) == 2:
            better = outcome.preferred[0].policy if outcome.preferred else None
            win = 0.5 if better is None else float(better == policies[1])
            wins[policies[1], policies[0]].append(win)
    return tuple(Contest(*two, len(won), sum(won)) for two, won in sorted(wins.items()))


def render(status: AnnotationStatus) -> str:
    """For people."""
    if not (status.num_pairs or status.annotators):
        return (
            "nothing is judged, and the queue is empty: `lockstep annotate queue iter_001` fills "
            "it, the Annotate page of `lockstep ui` asks"
        )
    open_pairs = status.num_pairs - status.num_done - status.num_begun
    lines = [
        f"queue        {status.num_pairs} pairs: {status.num_done} done, {status.num_begun} begun, "
        f"{open_pairs} not begun",
        f"judged       {status.num_judged} pairs, {status.num_ties} of them ties; "
        f"{status.num_withdrawn} judgements withdrawn",
    ]
    lines += [f"annotator    {_of_annotator(each)}" for each in status.annotators]
    lines += _agreement(status.fleiss, status.cohens)
    for source in status.sources:
        share = source.num_agreeing / source.num_pairs
        lines.append(
            f"{source.name:<12} agrees with people on {source.num_agreeing} of {source.num_pairs} "
            f"pairs ({share:.1%}), ties {source.num_tied}"
        )
    for contest in status.policies:
        lines.append(
            f"{contest.one:<12} preferred to {contest.other} in {contest.wins:g} of "
            f"{contest.num_pairs} pairs ({contest.wins / contest.num_pairs:.1%})"
        )
    return "\n".join([*lines, *status.notes])


def _of_annotator(each: Annotator) -> str:
    sides = "" if each.left_share is None else f", left {each.left_share:.0%} of the time"
    return f"{each.name}: {each.num_judged}, {each.num_ties} ties, {each.num_skips} skips{sides}"


def _agreement(all_of_them: Fleiss, cohens: Sequence[Cohen]) -> list[str]:
    if all_of_them.observed is None:
        return ["agreement    no pair was judged by two people (`--annotators 2`)"]
    return [
        f"agreement    {all_of_them.observed:.1%} on {all_of_them.num_pairs} pairs, Fleiss' kappa "
        f"{_number(all_of_them.kappa)}",
        *(
            f"             {each.one} and {each.other}: {each.observed:.1%} on {each.num_pairs}, "
            f"Cohen's kappa {_number(each.kappa)}"
            for each in cohens
        ),
    ]


def _number(kappa: float | None) -> str:
    return "undefined: all said the same" if kappa is None else f"{kappa:.3f}"
