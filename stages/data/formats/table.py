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


def _rated(
    name: FormatName, needs: str, response: Callable[[Row], Given], may: str = ""
) -> RowFormat:
    """A response with a rating."""
    read = lambda row: rated(response(row), row)  # noqa: E731
    return _format(name, needs, read, "prompt rating", RATINGS, may)


def _pairs(
    name: FormatName, needs: str, context: Callable[[Row], Given], may: str = ""
) -> RowFormat:
    """Two responses to what comes before them."""
    read = lambda row: compared(row, context(row).before)  # noqa: E731
    return _format(name, f"{needs} chosen rejected", read, "prompt pairs", may=f"{may} margin")


def _prompt(row: Row) -> Given:
    return Given(before=asked(row, "prompt"))


def _prompt_completion(row: Row) -> Given:
    return Given(before=asked(row, "prompt"), completion=response_of(row, "completion"))


def _messages(row: Row) -> Given:
    return Given(before=asked(row, "messages"))


def _conversations(row: Row) -> Given:
    return Given(before=asked(row, "conversations"))


def _instruction(row: Row) -> Given:
    return Given(before=instruction(row))


def _instruction_output(row: Row) -> Given:
    return Given(before=instruction(row), completion=response_of(row, "output"))


_TALK = "prompt completion"
_ALPACA = "input history"
FORMATS = {
    format.name: format
    for format in (
        _format(FormatName.TEXT, "text", lambda row: Given(text=text_of(row, "text")), "text"),
        _format(FormatName.MESSAGES, "messages", _messages, _TALK),
        _rated(FormatName.MESSAGES_RATED, "messages", _messages),
        _pairs(FormatName.MESSAGES_PREFERENCE, "messages", _messages),
        _format(FormatName.PROMPT, "prompt", _prompt, "prompt"),
        _format(FormatName.PROMPT_COMPLETION, "prompt completion", _prompt_completion, _TALK),
        _rated(FormatName.RATED, "prompt completion", _prompt_completion),
        _pairs(FormatName.PREFERENCE, "prompt", _prompt),
        _format(
            FormatName.IMPLICIT_PREFERENCE,
            "chosen rejected",
            lambda row: compared(row, None),
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
        _format(FormatName.ALPACA, "instruction output", _instruction_output, _TALK, may=_ALPACA),
        _format(FormatName.ALPACA_PROMPT, "instruction", _instruction, "prompt", may=_ALPACA),
        _rated(FormatName.ALPACA_RATED, "instruction output", _instruction_output, _ALPACA),
        _pairs(FormatName.ALPACA_PREFERENCE, "instruction", _instruction, f"{_ALPACA} output"),
        _format(FormatName.SHAREGPT, "conversations", _conversations, _TALK),
        _rated(FormatName.SHAREGPT_RATED, "conversations", _conversations),
        _pairs(FormatName.SHAREGPT_PREFERENCE, "conversations", _conversations),
    )
}
