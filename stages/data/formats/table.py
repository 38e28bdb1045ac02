"""The formats: which columns each is known by, and what a row of it gives.

A format is a *context* (what comes before the response: a prompt, messages, an instruction) and an
*outcome* (a response, two of them compared, a rating, labelled steps, ranked responses). A context
that ends with the assistant's turn has its response in it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stages.contracts.sources import FormatName, Role
from stages.data.formats.messages import as_json, tools_of
from stages.data.formats.rows import (
    RATINGS,
    Given,
    Row,
    answer_of,
    asked,
    compared,
    instruction,
    listed,
    ranked,
    rated,
    response_of,
    stepwise,
    text_of,
)
from stages.data.row_error import RowError

_ALWAYS = ("answer", "system", "tools")
"""Columns that mean the same in every format."""


@dataclass(frozen=True)
class RowFormat:
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
            answer=answer_of(row),
            extra={
                name: as_json(value, name)
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


def _format(
    name: FormatName,
    needs: str,
    read: Callable[[Row], Given],
    gives: str,
    one_of: Sequence[str] = (),
    may: str = "",
) -> RowFormat:
    words = frozenset(gives.split())
    return RowFormat(name, tuple(needs.split()), read, words, tuple(one_of), tuple(may.split()))


_ALPACA = "input history"
FORMATS = {
    format.name: format
    for format in (
        _format(FormatName.TEXT, "text", lambda r: Given(text=text_of(r, "text")), "text"),
        _format(
            FormatName.MESSAGES,
            "messages",
            lambda r: Given(before=asked(r, "messages")),
            "prompt completion",
        ),
        _format(
            FormatName.MESSAGES_RATED,
            "messages",
            lambda r: rated(Given(before=asked(r, "messages")), r),
            "prompt rating",
            one_of=RATINGS,
        ),
        _format(
            FormatName.MESSAGES_PREFERENCE,
            "messages chosen rejected",
            lambda r: compared(r, asked(r, "messages")),
            "prompt pairs",
            may="margin",
        ),
        _format(FormatName.PROMPT, "prompt", lambda r: Given(before=asked(r, "prompt")), "prompt"),
        _format(
            FormatName.PROMPT_COMPLETION,
            "prompt completion",
            lambda r: Given(before=asked(r, "prompt"), completion=response_of(r, "completion")),
            "prompt completion",
        ),
        _format(
            FormatName.RATED,
            "prompt completion",
            lambda r: rated(
                Given(before=asked(r, "prompt"), completion=response_of(r, "completion")), r
            ),
            "prompt rating",
            one_of=RATINGS,
        ),
        _format(
            FormatName.PREFERENCE,
            "prompt chosen rejected",
            lambda r: compared(r, asked(r, "prompt")),
            "prompt pairs",
            may="margin",
        ),
        _format(
            FormatName.IMPLICIT_PREFERENCE,
            "chosen rejected",
            lambda r: compared(r, None),
            "prompt pairs",
            may="margin",
        ),
        _format(
            FormatName.STEPWISE,
            "prompt labels",
            stepwise,
            "prompt steps",
            one_of=("completions", "steps"),
        ),
        _format(
            FormatName.RANKED,
            "completions",
            ranked,
            "prompt pairs",
            one_of=("context", "prompt"),
        ),
        _format(
            FormatName.ALPACA,
            "instruction output",
            lambda r: Given(before=instruction(r), completion=response_of(r, "output")),
            "prompt completion",
            may=_ALPACA,
        ),
        _format(
            FormatName.ALPACA_PROMPT,
            "instruction",
            lambda r: Given(before=instruction(r)),
            "prompt",
            may=_ALPACA,
        ),
        _format(
            FormatName.ALPACA_RATED,
            "instruction output",
            lambda r: rated(Given(before=instruction(r), completion=response_of(r, "output")), r),
            "prompt rating",
            one_of=RATINGS,
            may=_ALPACA,
        ),
        _format(
            FormatName.ALPACA_PREFERENCE,
            "instruction chosen rejected",
            lambda r: compared(r, instruction(r)),
            "prompt pairs",
            may=f"{_ALPACA} output margin",
        ),
        _format(
            FormatName.SHAREGPT,
            "conversations",
            lambda r: Given(before=asked(r, "conversations")),
            "prompt completion",
        ),
        _format(
            FormatName.SHAREGPT_RATED,
            "conversations",
            lambda r: rated(Given(before=asked(r, "conversations")), r),
            "prompt rating",
            one_of=RATINGS,
        ),
        _format(
            FormatName.SHAREGPT_PREFERENCE,
            "conversations chosen rejected",
            lambda r: compared(r, asked(r, "conversations")),
            "prompt pairs",
            may="margin",
        ),
    )
}
