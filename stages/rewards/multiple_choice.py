"""multiple_choice: whether the response chooses the right letter.

The choice is, in this order: the letter in the last \\boxed{}; the last one after the word "answer"
or "choice"; the last one written as a choice is, `(B)`, `B)` or `B.`; the last line, where it is a
letter alone. A bare letter inside a sentence is not a choice: "A dog" chooses nothing.
"""

import re
from collections.abc import Callable
from pathlib import Path

from stages.contracts.reward_rules import MultipleChoice
from stages.rewards.given import Row, Unusable
from stages.rewards.maths import last_boxed


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
    for pattern in (
        rf"(?i:answer|choice)(?i:\s+is|\s*:|\s+should\s+be)*[\s*:]*\(?([{letters}])\)?(?![\w'])",
        rf"\(([{letters}])\)|(?<![\w'])([{letters}])[).](?=[\s*]|$)",
    ):
        found = [str(match[match.lastindex or 0]) for match in re.finditer(pattern, response)]
        if found:
            return found[-1]
    lines = response.strip().splitlines()
    return _alone(lines[-1], letters) if lines else None


def _alone(text: str, letters: str) -> str | None:
    """The letter that a text is, or begins with as a choice does: `B`, `(B)`, `B) Paris`."""
    plain = re.sub(r"\\text\{(.*?)\}", r"\1", text)
    match = re.fullmatch(rf"[\s*(]*([{letters}])(?:[\s*.)]*|[.):]\s.*)", plain, re.DOTALL)
    return match[1] if match else None
