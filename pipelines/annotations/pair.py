"""A pair of the queue: two responses to one prompt that somebody is to compare.

Its id is that of what a person sees (prompt, tools and the two texts in either order), so nobody is
asked the same twice, wherever the texts come from. Which response is on the left depends on the
annotator's name and the id alone: a side says nothing of a policy, and every tab shows the same.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pipelines.annotations.judgement import Choice, Judgement, Origin, Response
from stages.data.seeds import content_id, stable_hash


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two responses, and how many people are to compare them."""

    messages: tuple[Mapping[str, Any], ...]
    one: Response
    other: Response
    origin: Origin
    tools: tuple[Mapping[str, Any], ...] = ()
    answer: str | None = None
    num_annotators: int = 1
    drawn: str = ""
    """How it was chosen, such as `close, seed 17`."""
    kind: Literal["pair"] = "pair"

    @property
    def id(self) -> str:
        assert self.origin.pair is not None
        return self.origin.pair

    def sides(self, annotator: str) -> tuple[Response, Response]:
        """Left and right, as this annotator sees them."""
        swapped = stable_hash("side", annotator, self.id) % 2
        return (self.other, self.one) if swapped else (self.one, self.other)

    def judged(self, annotator: str, chosen: Choice, note: str = "") -> Judgement:
        left, right = self.sides(annotator)
        return Judgement(
            messages=self.messages,
            left=left,
            right=right,
            chosen=chosen,
            annotator=annotator,
            origin=self.origin,
            tools=self.tools,
            answer=self.answer,
            note=note,
        )


def pair_id(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], one: str, other: str
) -> str:
    """The id of what a person sees."""
    return content_id(json.dumps([[*messages], [*tools], sorted([one, other])], sort_keys=True))


def identified(pair: Pair) -> Pair:
    """The pair with its id."""
    found = pair_id(pair.messages, pair.tools, pair.one.text, pair.other.text)
    return replace(pair, origin=replace(pair.origin, pair=found))
