"""pattern and format: whether a response looks as it should.

A pattern is a regular expression. Where it has a group called `answer`, what that caught must be
the row's answer, too. A format names tags: the response is nothing but these, each once, in this
order.
"""

import re
from collections.abc import Callable
from pathlib import Path

from stages.contracts.reward_rules import Format, Match, Pattern
from stages.rewards.given import Row


def open_pattern(params: Pattern, _folder: Path) -> Callable[[Row], float]:
    compiled = re.compile(params.pattern)
    find = compiled.fullmatch if params.match is Match.FULL else compiled.search

    def reward(row: Row) -> float:
        match = find(row["response"])
        if match is None or not params.needs_answer:
            return float(match is not None)
        return float((match["answer"] or "").strip() == row["answer"].strip())

    return reward


def open_format(params: Format, _folder: Path) -> Callable[[Row], float]:
    names = [re.escape(tag) for tag in params.tags]
    any_tag = rf"</?(?:{'|'.join(names)})>"
    inside = rf"(?:(?!{any_tag}).)*"
    wanted = re.compile(r"\s*".join(f"<{name}>{inside}</{name}>" for name in names), re.DOTALL)
    return lambda row: float(wanted.fullmatch(row["response"].strip()) is not None)
