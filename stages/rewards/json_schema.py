"""json_schema: whether a response is JSON that fits a schema.

The JSON is the whole response, or all that stands in one ``` fence. A schema that refers to an
address outside itself is refused: nothing is fetched while responses are scored.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stages.contracts.reward_rules import JsonSchema
from stages.rewards.given import Row

_FENCED = re.compile(r"```(?:json)?[ \t\r]*\n(.*)```", re.DOTALL)
_NOT_JSON = object()


def open_rule(params: JsonSchema, folder: Path) -> Callable[[Row], float]:
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    schema: Any = params.definition
    if params.file is not None:
        schema = json.loads((folder / params.file).read_text(encoding="utf-8"))
    kind = validator_for(schema)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"this is no JSON schema: {error.message}") from None
    validator = kind(schema, registry=Registry())
    for text in ("null", '""', "0", "[]", "{}"):
        try:
            validator.is_valid(_value(text))
        except RecursionError:
            raise ValueError("this JSON schema refers to itself without end") from None
        except Unresolvable as error:
            raise ValueError(f"this JSON schema refers to what is not in it: {error}") from None

    def reward(row: Row) -> float:
        value = _value(row["response"].strip())
        try:
            return float(value is not _NOT_JSON and validator.is_valid(value))
        except (RecursionError, ArithmeticError):
            # As with JSON that is too deep to be read: the response is, the schema is not. A
            # number may be too large to be divided.
            return 0.0

    return reward


def _value(text: str) -> Any:
    fenced = _FENCED.fullmatch(text)
    try:
        return json.loads(fenced[1] if fenced else text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _NOT_JSON


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
