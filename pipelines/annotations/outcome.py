"""What people said of each pair together: the answer that most of them gave.

Where two answers are level, or where most saw no difference, the pair is a tie. Skips count for
nothing. The two responses of a pair are in the order of their texts, whoever saw them where.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from pipelines.annotations.agreement import Ratings
from pipelines.annotations.judgement import Choice, Judgement, Response
from pipelines.annotations.queue import by_pair

FIRST, SECOND, TIE = "first", "second", "tie"


@dataclass(frozen=True)
class Outcome:
    """A pair that at least one person has an opinion of."""

    pair: str
    judgements: tuple[Judgement, ...]
    """In the order of time, skips left out."""

    @cached_property
    def responses(self) -> tuple[Response, Response]:
        """Without their order on anybody's screen."""
        shown = self.judgements[0]
        first, second = sorted((shown.left, shown.right), key=lambda response: response.text)
        return first, second

    @cached_property
    def votes(self) -> Counter[str]:
        return Counter(self.said_by(judgement) for judgement in self.judgements)

    @cached_property
    def majority(self) -> str:
        (best, number), *rest = self.votes.most_common()
        return TIE if rest and rest[0][1] == number else best

    @property
    def preferred(self) -> tuple[Response, Response] | None:
        """The better response and the worse one; None for a tie."""
        first, second = self.responses
        return {FIRST: (first, second), SECOND: (second, first)}.get(self.majority)

    def said_by(self, judgement: Judgement) -> str:
        preferred = judgement.preferred
        if preferred is None:
            return TIE
        return FIRST if preferred.text == self.responses[0].text else SECOND


def outcomes(judgements: Iterable[Judgement]) -> list[Outcome]:
    """One for each pair, in the order of their ids."""
    grouped = by_pair(j for j in judgements if j.chosen is not Choice.SKIP)
    return [Outcome(pair, tuple(judged)) for pair, judged in sorted(grouped.items())]


def ratings(found: Iterable[Outcome]) -> Ratings:
    """By pair and annotator, for measures of agreement."""
    return {
        outcome.pair: {j.annotator: outcome.said_by(j) for j in outcome.judgements}
        for outcome in found
    }
