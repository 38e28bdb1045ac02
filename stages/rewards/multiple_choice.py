"""multiple_choice: whether the response chooses the right letter.

The choice is, in this order: the letter in the last \\boxed{}; the last one after the word "answer"
or "choice", or after "option is"; the last line, where it is a letter alone; the last one written
as a choice is, `(B)`, `B)` or `B.`. A bare letter inside a sentence is not a choice: "A dog"
chooses nothing. Small letters count where nothing but a choice is there: `b`, `answer: b`.
"""

import re
from collections.abc import Callable
from pathlib import Path

from stages.contracts.reward_rules import MultipleChoice
from stages.rewards.given import Row, Unusable
from stages.rewards.maths import last_boxed

# To the end of the line where it is not closed, so that nothing is read twice.
_TEXT = re.compile(r"\\text\{([^}\n]*+)(\}?)")


def open_rule(params: MultipleChoice, _folder: Path) -> Callable[[Row], float]:
    letters = params.letters

    def reward(row: Row) -> float:
        expected = _alone(row["answer"], letters)
        if expected is None:
            raise Unusable(f"its 'answer' {row['answer']!r} is none of the letters {letters}")
        return float(choice(row["response"], letters) == expected)

    return reward


def choice(response: str, letters: str) -> str | None:
    """The letter that the response chooses, if any."""
    boxed = last_boxed(response)
    if boxed is not None:
        return _alone(boxed, letters)
    small = letters.lower()
    letter = rf"([{letters}])(?![\w'])|([{small}])(?=[\s*.)\]\"'$]*(?:\n|$))"
    verb = r"\s+is|\s*[:=]|\s+(?:should|must|would)\s+be"
    named = (
        rf"(?:(?i:answer|choice)(?i:{verb})*+|(?i:option)(?i:{verb})++)"
        rf"(?i:\s+(?:option|choice|letter))?[\s*:$\"'(\[]*+(?:{letter})"
    )
    if choices := _letters(named, response):
        return choices[-1]
    lines = response.strip().splitlines() or [""]
    if (last := re.fullmatch(rf"[\s*(]*([{letters}{small}])[\s*.)]*", lines[-1])) is not None:
        return last[1].upper()
    if choices := _letters(rf"\(([{letters}])\)|(?<![\w'])([{letters}])[).](?=[\s*]|$)", response):
        return choices[-1]
    return _alone(lines[-1], letters)


def _letters(pattern: str, text: str) -> list[str]:
    return [str(match[match.lastindex or 0]).upper() for match in re.finditer(pattern, text)]


def _alone(text: str, letters: str) -> str | None:
    """The letter that a text is, or begins with as a choice does: `B`, `(B)`, `B) Paris`."""
    plain = _TEXT.sub(lambda match: match[1] if match[2] else match[0], text)
    wanted = rf"[\s*(]*([{letters}])(?:[\s*.)]*|[.):]\s.*)"
    match = re.fullmatch(wanted, plain, re.DOTALL | re.IGNORECASE)
    return match[1].upper() if match else None
