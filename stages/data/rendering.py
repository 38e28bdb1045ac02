"""Rows of the roles as rows of the schemas: texts with their token ids.

All texts of a batch are tokenised in one call. A row that cannot be rendered or does not fit the
context comes back with what is wrong with it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from stages.data.artifacts import canonical_json
from stages.data.dialogue import response_text, spoken
from stages.data.items import Demonstration, Example, Labelled, Pair, Rated
from stages.data.offered_tools import tools_hash
from stages.data.row_error import RowError
from stages.data.tokenizer import Renderer, Response, Segment


class TooLong(RowError):
    """A row that does not fit the context."""


@dataclass(frozen=True)
class Rendered:
    """A row of the schema of its role, and the tokens of its longest sequence."""

    values: Mapping[str, Any]
    length: int


@dataclass(frozen=True)
class _Plan:
    """The texts of a row, to be tokenised each by itself: the prompt's, then its responses'."""

    asked: str
    responses: Sequence[Sequence[Segment]]

    def texts(self) -> Iterator[str]:
        yield self.asked
        for segments in self.responses:
            yield from (segment.text for segment in segments)


def render(
    items: Sequence[Example], renderer: Renderer, max_length: int
) -> Iterator[tuple[Example, Rendered | RowError]]:
    """Each item with its row."""
    plans = _plans(items, renderer)
    texts = [t for plan in plans if isinstance(plan, _Plan) for t in plan.texts()]
    ids = iter(renderer.ids(texts))
    for item, plan in zip(items, plans, strict=True):
        if isinstance(plan, RowError):
            yield item, plan
            continue
        asked = next(ids)
        responses = [
            (segments, [next(ids) for _ in segments]) for segments in plan.responses
        ]  # all of them, whatever is wrong with the row
        try:
            yield item, _row(item, asked, responses, renderer, max_length)
        except RowError as error:
            yield item, error


def _plans(items: Sequence[Example], renderer: Renderer) -> list[_Plan | RowError]:
    asking = [item for item in items if item.prompt.messages]
    prompts = iter(renderer.prompt_texts([item.prompt for item in asking]))
    plans: list[_Plan | RowError] = []
    for item in items:
        asked = next(prompts) if item.prompt.messages else ""
        try:
            plans.append(asked if isinstance(asked, RowError) else _plan(item, asked, renderer))
        except RowError as error:
            plans.append(error)
    return plans


def _plan(item: Example, asked: str, renderer: Renderer) -> _Plan:
    if isinstance(item, Demonstration) and item.plain_text:
        return _Plan(item.completion[0]["content"], ())
    if isinstance(item, Labelled):
        # Steps are tokenised one by one, so that each ends with a token; the last ends the text.
        last = len(item.steps) - 1
        steps = [Segment(step, ends=index == last) for index, step in enumerate(item.steps)]
        return _Plan(asked, [steps])
    responses = [renderer.response(item.prompt, asked, turns) for turns in item.responses()]
    return _Plan(asked, responses)


def _row(
    item: Example,
    asked: list[int],
    responses: Sequence[tuple[Sequence[Segment], Sequence[list[int]]]],
    renderer: Renderer,
    max_length: int,
) -> Rendered:
    if isinstance(item, Demonstration) and item.plain_text:
        prompt_ids, completion = renderer.free_text(asked)
        made = [Response(completion, None)]
    else:
        prompt_ids = renderer.prompt_ids(asked)
        made = [renderer.joined(segments, ids) for segments, ids in responses]
    _check_length(len(prompt_ids), [len(response.ids) for response in made], max_length)
    values = {
        "row_id": item.row_id,
        "source": item.place.source,
        "line": item.place.line,
        "template": renderer.template_hash,
        "prompt_id": item.prompt.id,
        "prompt": item.prompt.text,
        "prompt_ids": prompt_ids,
        **_of_its_role(item, made, responses, renderer),
    }
    return Rendered(values, len(prompt_ids) + max((len(r.ids) for r in made), default=0))


def _of_its_role(
    item: Example,
    made: Sequence[Response],
    responses: Sequence[tuple[Sequence[Segment], Sequence[list[int]]]],
    renderer: Renderer,
) -> dict[str, Any]:
    if isinstance(item, Pair):
        return {
            "chosen": spoken(item.chosen),
            "rejected": spoken(item.rejected),
            "answer": item.answer,
            "margin": item.margin,
            "chosen_ids": made[0].ids,
            "rejected_ids": made[1].ids,
        }
    if isinstance(item, Rated):
        return {
            "completion": spoken(item.completion),
            "rating": item.rating,
            "completion_ids": made[0].ids,
        }
    if isinstance(item, Labelled):
        [(_, steps)] = responses
        lengths = list(accumulate(map(len, steps)))
        return {
            "completion_ids": made[0].ids,
            # The last step ends with the end token.
            "step_ends": [*(length - 1 for length in lengths[:-1]), len(made[0].ids) - 1],
            "step_labels": list(item.labels),
        }
    if isinstance(item, Demonstration):
        return {
            "answer": item.answer,
            "extra": canonical_json(item.extra),
            "completion": response_text(item.completion),
            "completion_ids": made[0].ids,
            "loss_mask": made[0].loss_mask,
        }
    tools = renderer.offered(item.prompt)
    beside = {"tools": tools_hash(tools)} if tools and item.prompt.messages else {}
    return {"answer": item.answer, "extra": canonical_json({**item.extra, **beside})}


def _check_length(prompt: int, responses: Sequence[int], max_length: int) -> None:
    if not prompt:
        raise RowError("its prompt has no token: there is nothing for a response to follow")
    if prompt >= max_length:
        raise TooLong(
            f"the prompt has {prompt} tokens and leaves no room for a response in "
            f"model.max_length {max_length}: shorten it or raise model.max_length"
        )
    longest = prompt + max(responses, default=0)
    if longest > max_length:
        raise TooLong(
            f"prompt and response have {longest} tokens together, more than "
            f"model.max_length {max_length}: shorten them or raise model.max_length"
        )
