"""What a row gives, in one shape, whatever format it is written in.

A format is a *context* (what comes before the response: a prompt, messages, an instruction) and an
*outcome* (a response, two of them compared, a rating, labelled steps, ranked responses). A context
that ends with the assistant's turn has its response in it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

from stages.contracts.sources import FormatName, Role
from stages.data.dialogue import Dialogue, Message
from stages.data.formats.messages import RowError, messages_of, tools_of

Row = Mapping[str, Any]
RATINGS = ("label", "rating", "kto_tag")
_ALWAYS = ("answer", "system", "tools")
"""Columns that mean the same in every format."""


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


@dataclass(frozen=True)
class Format:
    """Columns, and how they are read."""

    name: FormatName
    needs: tuple[str, ...]
    read: Callable[[Row], Given]
    gives: frozenset[str]
    """Of prompt, completion, text, pairs, rating and steps."""
    one_of: tuple[str, ...] = ()
    may: tuple[str, ...] = ()

    def own(self, columns: frozenset[str]) -> frozenset[str]:
        """The columns that it is known by, of those that are there; empty: it is not this one."""
        chosen = frozenset(self.one_of) & columns
        if not columns.issuperset(self.needs) or (self.one_of and not chosen):
            return frozenset()
        return frozenset(self.needs) | chosen

    def serves(self, role: Role, *, chosen: bool = False) -> bool:
        """Whether rows of a role can be made of its rows."""
        if chosen:
            return role is Role.DEMONSTRATIONS and "pairs" in self.gives
        return bool(self.gives & _SERVING[role]) and not (
            role is Role.DEMONSTRATIONS and "rating" in self.gives
        )

    @property
    def columns(self) -> frozenset[str]:
        """Every column that it reads."""
        return frozenset((*self.needs, *self.one_of, *self.may, *_ALWAYS))

    def given(self, row: Row) -> Given:
        """What a row gives; RowError says what is wrong with it."""
        for name in self.needs:
            if row.get(name) is None:
                raise RowError(f"there is no {name!r}: each row needs {listed(self.needs)}")
        given = self.read(row)
        before = list(given.before)
        if row.get("system"):
            if before and before[0]["role"] == "system":
                raise RowError("'system' and the messages both have a system message: keep one")
            before.insert(0, {"role": "system", "content": text_of(row, "system")})
        if given.text is None and not any(message["content"] for message in before):
            raise RowError("the prompt is empty: write a prompt or drop the row")
        return replace(
            given,
            before=before,
            tools=tools_of(row.get("tools")),
            answer=_answer(row),
            extra={
                name: _as_json(value, name)
                for name, value in row.items()
                if name not in self.columns
            },
        )


_SERVING = {
    Role.DEMONSTRATIONS: {"completion", "text"},
    Role.PREFERENCES: {"pairs"},
    Role.HELD_OUT_PREFERENCES: {"pairs"},
    Role.FEEDBACK: {"rating", "pairs"},
    Role.STEPS: {"steps"},
    Role.PROMPTS: {"prompt"},
    Role.HELD_OUT: {"prompt"},
}


def text_of(row: Row, name: str) -> str:
    value = row.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RowError(f"{name!r} is {type(value).__name__}: write text in quotes")
    return value


def number_of(value: Any, name: str) -> float:
    """A number, true or false; as text too, because CSV has nothing else."""
    told = (
        {"true": 1.0, "false": 0.0}.get(value.strip().lower()) if isinstance(value, str) else None
    )
    try:
        number = float(value) if told is None else told
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        kind = type(value).__name__
        raise RowError(f"{name!r} is {kind}: write a number, true or false")
    return number


def listed(names: Sequence[str]) -> str:
    quoted = [repr(name) for name in names]
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)


def _as_json(value: Any, name: str) -> Any:
    """A value that Parquet can hold and JSON cannot, as one that it can."""
    match value:
        case None | str() | bool() | int():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): _as_json(item, name) for key, item in value.items()}
        case list() | tuple():
            return [_as_json(item, name) for item in value]
        case date() | time() | timedelta() | Decimal():
            return str(value)
        case _:
            raise RowError(
                f"{name!r} holds {type(value).__name__}, which is no JSON: leave the column out "
                f"with `columns: {{{name}: null}}`"
            )


def _answer(row: Row) -> str | None:
    value = row.get("answer")
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if value is not None and not isinstance(value, str):
        raise RowError(
            f"'answer' is {type(value).__name__}: write text in quotes, or give the column another "
            "name in `columns` to find it in `extra`"
        )
    return value


def _asked(row: Row, name: str) -> list[Message]:
    return messages_of(row[name], name, "user")


def _said(row: Row, name: str) -> list[Message]:
    return messages_of(row[name], name, "assistant")


def _instruction(row: Row) -> list[Message]:
    """Alpaca's history, then the instruction with its input under it."""
    turns: list[Message] = []
    for pair in row.get("history") or ():
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise RowError("'history' is a list of [question, response] pairs")
        turns += [
            {"role": "user", "content": pair[0]},
            {"role": "assistant", "content": pair[1]},
        ]
    parts = [text_of(row, "instruction"), text_of(row, "input")]
    return [*turns, {"role": "user", "content": "\n".join(part for part in parts if part)}]


def _before_response(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """A whole dialogue as what comes before the last assistant's turn, and that turn."""
    if messages[-1]["role"] != "assistant" or len(messages) < 2:
        raise RowError("a whole dialogue ends with what the assistant says to something")
    return list(messages[:-1]), [messages[-1]]


def _compared(row: Row, before: Sequence[Message] | None) -> Given:
    """Two responses; where they are whole dialogues, the prompt is what they have in common."""
    sides = [_said(row, name) for name in ("chosen", "rejected")]
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


def _rated(given: Given, row: Row) -> Given:
    told = [name for name in RATINGS if row.get(name) is not None]
    if len(told) != 1:
        raise RowError(f"a row has one of {listed(RATINGS)}; this one has {len(told)}")
    return replace(given, rating=number_of(row[told[0]], told[0]))


def _stepwise(row: Row) -> Given:
    told = [name for name in ("completions", "steps") if row.get(name) is not None]
    if len(told) != 1:
        raise RowError(f"a row has one of 'completions' and 'steps'; this one has {len(told)}")
    steps, labels = row[told[0]], row["labels"]
    if not (isinstance(steps, list) and all(isinstance(step, str) for step in steps)):
        raise RowError(f"{told[0]!r} is {type(steps).__name__}: write a list of texts")
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
    return Given(before=_asked(row, "prompt"), steps=steps, labels=numbers)


def _ranked(row: Row) -> Given:
    """Every two responses of different ranks are a pair; the lower rank is the better one."""
    told = [name for name in ("context", "prompt") if row.get(name) is not None]
    if len(told) != 1:
        raise RowError(f"a row has one of 'context' and 'prompt'; this one has {len(told)}")
    listing = row["completions"]
    if not isinstance(listing, list) or not all(
        isinstance(item, Mapping) and {"rank", "completion"} <= item.keys() for item in listing
    ):
        raise RowError("'completions' is a list of objects with 'rank' and 'completion'")
    ranked = sorted(
        ((number_of(item["rank"], "rank"), _said(item, "completion")) for item in listing),
        key=lambda entry: entry[0],
    )
    pairs = [
        (better, worse)
        for index, (rank, better) in enumerate(ranked)
        for other, worse in ranked[index + 1 :]
        if rank < other
    ]
    if not pairs:
        raise RowError("no two responses have different ranks: there is nothing to compare")
    return Given(before=_asked(row, told[0]), pairs=pairs)


def _format(
    name: FormatName,
    needs: str,
    read: Callable[[Row], Given],
    gives: str,
    one_of: Sequence[str] = (),
    may: str = "",
) -> Format:
    words = frozenset(gives.split())
    return Format(name, tuple(needs.split()), read, words, tuple(one_of), tuple(may.split()))


_ALPACA = "input history"
FORMATS = {
    format.name: format
    for format in (
        _format(FormatName.TEXT, "text", lambda r: Given(text=text_of(r, "text")), "text"),
        _format(
            FormatName.MESSAGES,
            "messages",
            lambda r: Given(before=_asked(r, "messages")),
            "prompt completion",
        ),
        _format(
            FormatName.MESSAGES_RATED,
            "messages",
            lambda r: _rated(Given(before=_asked(r, "messages")), r),
            "prompt rating",
            one_of=RATINGS,
        ),
        _format(
            FormatName.MESSAGES_PREFERENCE,
            "messages chosen rejected",
            lambda r: _compared(r, _asked(r, "messages")),
            "prompt pairs",
            may="margin",
        ),
        _format(FormatName.PROMPT, "prompt", lambda r: Given(before=_asked(r, "prompt")), "prompt"),
        _format(
            FormatName.PROMPT_COMPLETION,
            "prompt completion",
            lambda r: Given(before=_asked(r, "prompt"), completion=_said(r, "completion")),
            "prompt completion",
        ),
        _format(
            FormatName.RATED,
            "prompt completion",
            lambda r: _rated(
                Given(before=_asked(r, "prompt"), completion=_said(r, "completion")), r
            ),
            "prompt rating",
            one_of=RATINGS,
        ),
        _format(
            FormatName.PREFERENCE,
            "prompt chosen rejected",
            lambda r: _compared(r, _asked(r, "prompt")),
            "prompt pairs",
            may="margin",
        ),
        _format(
            FormatName.IMPLICIT_PREFERENCE,
            "chosen rejected",
            lambda r: _compared(r, None),
            "prompt pairs",
            may="margin",
        ),
        _format(
            FormatName.STEPWISE,
            "prompt labels",
            _stepwise,
            "prompt steps",
            one_of=("completions", "steps"),
        ),
        _format(
            FormatName.RANKED,
            "completions",
            _ranked,
            "prompt pairs",
            one_of=("context", "prompt"),
        ),
        _format(
            FormatName.ALPACA,
            "instruction output",
            lambda r: Given(before=_instruction(r), completion=_said(r, "output")),
            "prompt completion",
            may=_ALPACA,
        ),
        _format(
            FormatName.ALPACA_PROMPT,
            "instruction",
            lambda r: Given(before=_instruction(r)),
            "prompt",
            may=_ALPACA,
        ),
        _format(
            FormatName.ALPACA_RATED,
            "instruction output",
            lambda r: _rated(Given(before=_instruction(r), completion=_said(r, "output")), r),
            "prompt rating",
            one_of=RATINGS,
            may=_ALPACA,
        ),
        _format(
            FormatName.ALPACA_PREFERENCE,
            "instruction chosen rejected",
            lambda r: _compared(r, _instruction(r)),
            "prompt pairs",
            may=f"{_ALPACA} output margin",
        ),
        _format(
            FormatName.SHAREGPT,
            "conversations",
            lambda r: Given(before=_asked(r, "conversations")),
            "prompt completion",
        ),
        _format(
            FormatName.SHAREGPT_RATED,
            "conversations",
            lambda r: _rated(Given(before=_asked(r, "conversations")), r),
            "prompt rating",
            one_of=RATINGS,
        ),
        _format(
            FormatName.SHAREGPT_PREFERENCE,
            "conversations chosen rejected",
            lambda r: _compared(r, _asked(r, "conversations")),
            "prompt pairs",
            may="margin",
        ),
    )
}
