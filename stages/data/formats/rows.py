"""What a row gives, in one shape, and how its columns are read."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stages.data.dialogue import Dialogue, Message, reply
from stages.data.formats.messages import from_json, messages_of
from stages.data.row_error import RowError

Row = Mapping[str, Any]
LARGEST = 3.4e38
"""Of the numbers that 32 bits hold, as they are stored."""
RATINGS = ("label", "rating", "kto_tag")


@dataclass(frozen=True)
class Given:
    """What a row gives."""

    before: Sequence[Message] = ()
    """What comes before the response; with the response in it, where the row has one dialogue."""
    completion: Sequence[Message] = ()
    pairs: Sequence[tuple[Sequence[Message], Sequence[Message]]] = ()
    """Responses, the better one first."""
    margin: float | None = None
    rating: float | None = None
    steps: Sequence[str] = ()
    labels: Sequence[float] = ()
    text: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    answer: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def dialogue(self) -> Dialogue:
        """The prompt with its response."""
        return Dialogue((*self.before, *self.completion), self.tools)


def text_of(row: Row, name: str) -> str:
    value = row.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RowError(f"{name!r} is {type(value).__name__}: write text in quotes")
    return value


def number_of(value: Any, name: str) -> float:
    """A number, true or false; as text too, because CSV has nothing else."""
    truth = (
        {"true": 1.0, "false": 0.0}.get(value.strip().lower()) if isinstance(value, str) else None
    )
    try:
        number = float(value) if truth is None else truth
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= LARGEST:
        kind = type(value).__name__
        raise RowError(f"{name!r} is {kind}: write a number, true or false")
    return number


def listed(names: Sequence[str]) -> str:
    quoted = [repr(name) for name in names]
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)


def answer_of(row: Row) -> str | None:
    value = row.get("answer")
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if value is not None and not isinstance(value, str):
        raise RowError(
            f"'answer' is {type(value).__name__}: write text in quotes, or give the column another "
            "name in `columns` to find it in `extra`"
        )
    return value


def asked(row: Row, name: str) -> list[Message]:
    return messages_of(row[name], name, "user")


def response_of(row: Row, name: str) -> list[Message]:
    return messages_of(row[name], name, "assistant")


def instruction(row: Row) -> list[Message]:
    """Alpaca's history, then the instruction with its input under it."""
    turns: list[Message] = []
    history = from_json(row.get("history"), "history") or []
    for pair in history if isinstance(history, list) else [history]:
        texts = isinstance(pair, list) and all(isinstance(text, str) for text in pair)
        if not texts or len(pair) != 2:
            raise RowError("'history' is a list of [question, response] pairs of texts")
        turns += [{"role": "user", "content": pair[0]}, reply(pair[1])]
    parts = [text_of(row, "instruction"), text_of(row, "input")]
    return [*turns, {"role": "user", "content": "\n".join(part for part in parts if part)}]


def _before_response(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """A whole dialogue as what comes before the last assistant's turn, and that turn."""
    if messages[-1]["role"] != "assistant" or len(messages) < 2:
        raise RowError("a whole dialogue ends with what the assistant says to something")
    return list(messages[:-1]), [messages[-1]]


def compared(row: Row, before: Sequence[Message] | None) -> Given:
    """Two responses; where they are whole dialogues, the prompt is what they have in common."""
    sides = [response_of(row, name) for name in ("chosen", "rejected")]
    for name, messages in zip(("chosen", "rejected"), sides, strict=True):
        if messages[0]["role"] == "assistant" and len(messages) > 1:
            raise RowError(f"{name!r} has several turns: only the last can differ in a pair")
    whole = [messages[0]["role"] != "assistant" for messages in sides]
    if any(whole):
        if not all(whole):
            raise RowError("one of 'chosen' and 'rejected' is a whole dialogue, the other is not")
        (shared, better), (other, worse) = map(_before_response, sides)
        if shared != other:
            raise RowError(
                "'chosen' and 'rejected' differ before the last response: they answer two prompts"
            )
        if before is not None and list(before) not in (shared, _without_system(shared)):
            raise RowError("'chosen' is a whole dialogue, and begins otherwise than the prompt")
        before, sides = shared, [better, worse]
    if before is None:
        raise RowError(
            "'chosen' and 'rejected' are plain text and there is no prompt: name its column "
            "'prompt' in `columns`"
        )
    margin = row.get("margin")
    return Given(
        before=before,
        pairs=[(sides[0], sides[1])],
        margin=None if margin is None else number_of(margin, "margin"),
    )


def _without_system(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if message["role"] != "system"]


def _one_of(row: Row, names: Sequence[str]) -> str:
    """The one column of these that a row has."""
    there = [name for name in names if row.get(name) is not None]
    if len(there) != 1:
        raise RowError(f"a row has one of {listed(names)}; this one has {len(there)}")
    return there[0]


def rated(given: Given, row: Row) -> Given:
    name = _one_of(row, RATINGS)
    return replace(given, rating=number_of(row[name], name))


def stepwise(row: Row) -> Given:
    name = _one_of(row, ("completions", "steps"))
    steps, labels = from_json(row[name], name), from_json(row["labels"], "labels")
    if not (isinstance(steps, list) and all(isinstance(step, str) for step in steps)):
        raise RowError(f"{name!r} is {type(steps).__name__}: write a list of texts")
    if not isinstance(labels, list):
        raise RowError(f"'labels' is {type(labels).__name__}: write a list of numbers")
    if len(steps) != len(labels) or not steps or not all(steps):
        raise RowError(
            f"there are {len(steps)} steps and {len(labels)} labels: write one label for each "
            "step, and no empty step"
        )
    numbers = [number_of(label, "labels") for label in labels]
    if not all(0 <= number <= 1 for number in numbers):
        raise RowError("a label is 1 or true for a right step, 0 or false otherwise")
    return Given(before=asked(row, "prompt"), steps=steps, labels=numbers)


def ranked(row: Row) -> Given:
    """Every two responses of different ranks are a pair; the lower rank is the better one."""
    context = _one_of(row, ("context", "prompt"))
    listing = from_json(row["completions"], "completions")
    if not isinstance(listing, list) or not all(
        isinstance(item, Mapping) and {"rank", "completion"} <= item.keys() for item in listing
    ):
        raise RowError("'completions' is a list of objects with 'rank' and 'completion'")
    in_order = sorted(
        ((number_of(item["rank"], "rank"), response_of(item, "completion")) for item in listing),
        key=lambda entry: entry[0],
    )
    pairs = [
        (better, worse)
        for index, (rank, better) in enumerate(in_order)
        for other, worse in in_order[index + 1 :]
        if rank < other
    ]
    if not pairs:
        raise RowError("no two responses have different ranks: there is nothing to compare")
    return Given(before=asked(row, context), pairs=pairs)
