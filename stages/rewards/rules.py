"""The built-in rules: each scores one response and its row.

A rule is pure: the same row and params give the same reward. It may take for ever on an odd
response, so it is called in a process that can be ended (isolated.py).
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from stages.contracts.reward_rules import AnyRule, CorrectnessRule
from stages.rewards import (
    instructions,
    json_schema,
    length,
    maths,
    multiple_choice,
    pattern,
    repetition,
)
from stages.rewards.given import Row, Unusable

RuleOf = Callable[[Row], float]
_OPEN: Mapping[str, Callable[[Any, Path], RuleOf]] = {
    "maths": maths.open_rule,
    "multiple_choice": multiple_choice.open_rule,
    "pattern": pattern.open_pattern,
    "format": pattern.open_format,
    "json_schema": json_schema.open_rule,
    "instructions": instructions.open_rule,
    "length": length.open_rule,
    "repetition": repetition.open_rule,
}


def open_rule(values: Mapping[str, Any], folder: Path) -> RuleOf:
    """The rule that these params describe; `folder` has the files that they name."""
    params: Any = TypeAdapter(AnyRule).validate_python(values)
    rule = _OPEN[params.kind](params, folder)
    must_end = isinstance(params, CorrectnessRule) and params.must_end

    def reward(row: Row) -> float:
        if params.needs_answer and row["answer"] is None:
            raise Unusable("it has no 'answer', which the response is compared with")
        if must_end and row["finish_reason"] != "stop":
            return 0.0
        return float(rule(row))

    return reward
