"""maths: whether a response's result equals the expected one as mathematics.

The expected one is the row's `answer`; of one that shows its working, as in GSM8K, what follows the
last `####`. The response's result is what its last \\boxed{} holds; without one, what follows its
last `####`; without that, what math-verify finds in the whole text, which is mostly the last
formula or number; and where it finds nothing, the last number. Equal are 1/2, 0.5 and \\frac{1}{2};
1,234 and 1234; $18 and 18; 50%, 50\\% and 0.5.
"""

import logging
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from stages.contracts.reward_rules import Maths
from stages.rewards.given import Row, Unusable

MARK = "####"
_PERCENT = re.compile(r"\$?\s*[-+]?(?:[\d,]*\.\d+|[\d,]*\d)\s*(?:\\\s*)?%\s*\$?")
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+")


def open_rule(_params: Maths, _folder: Path) -> Callable[[Row], float]:
    # Its own time limits are alarms, and do not reach into C: the process's limit does.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    # What it imports when it is first used must not be on the first response's account.
    _equal(_parsed("1", formula=True), _parsed("the answer is 2", formula=False))
    return lambda row: float(is_right(row["response"], row["answer"]))


def is_right(response: str, answer: str) -> bool:
    """Whether the response's result is the expected one; Unusable where that is no result."""
    expected, stated, given = _results(response, answer)
    if _plain(given) == _plain(expected):
        return True
    one, other = _number(expected), _number(given)
    if one is not None and other is not None:
        return one == other
    parsed = _parsed(given, formula=stated is not None)
    if parsed:
        return _equal(_parsed(expected, formula=True), parsed)
    last = _NUMBER.findall(given)
    return bool(last) and one is not None and _number(last[-1]) == one


def is_plainly_right(response: str, answer: str) -> bool:
    """The same without mathematics, for who cannot stop it: results are equal as texts or as
    numbers, and 1/2 is not 0.5. A text that states no result has its last number as one."""
    expected, stated, given = _results(response, answer)
    candidates = [given, *([] if stated is not None else _NUMBER.findall(given)[-1:])]
    number = _number(expected)
    return any(
        _plain(text) == _plain(expected) or (number is not None and _number(text) == number)
        for text in candidates
    )


def _results(response: str, answer: str) -> tuple[str, str | None, str]:
    """The expected one; the one that the response states, if it does; that, or all it says."""
    response, answer = (text.replace("\u2212", "-") for text in (response, answer))
    expected = answer.rsplit(MARK, 1)[-1].strip()
    if not expected:
        raise Unusable(f"its 'answer' {answer!r} ends without a result")
    stated = last_boxed(response)
    if stated is None and MARK in response:
        stated = response.rsplit(MARK, 1)[-1].strip().partition("\n")[0]
    return expected, stated, response if stated is None else stated


def last_boxed(text: str) -> str | None:
    """What the last \\boxed{...} holds, braces within it counted; None where there is none."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len(r"\boxed{")
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position].strip()
    return None


def _plain(text: str) -> str:
    return text.strip().strip("$").strip().rstrip(".").strip()


def _number(text: str) -> Decimal | None:
    """The number that a text is, if it is nothing else: $1,234.50 and 18 are, 18 apples is not."""
    plain = _plain(text)
    if not _NUMBER.fullmatch(plain):
        return None
    try:
        return Decimal(plain.replace(",", ""))
    except InvalidOperation:
        return None


def _parsed(text: str, *, formula: bool) -> list[Any]:
    """What math-verify makes of a formula, or of a text that has one somewhere."""
    from math_verify import parse

    if _PERCENT.fullmatch(text.strip()):
        # In a box, math-verify does not read it as a number.
        return list(parse(text.replace("\\", "").replace("$", ""), parsing_timeout=0))
    if not formula:
        return list(parse(text, parsing_timeout=0))
    return list(parse(rf"\boxed{{{text}}}", parsing_timeout=0)) or list(
        parse(text, parsing_timeout=0)
    )


def _equal(expected: list[Any], given: list[Any]) -> bool:
    from math_verify import verify

    return bool(expected) and bool(verify(expected, given, timeout_seconds=0))
