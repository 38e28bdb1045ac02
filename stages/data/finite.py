"""Checks for NaN and infinity: they stop a stage, and the error names row and token."""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from stages.context import StageError


def sample_name(row: Mapping[str, Any]) -> str:
    """A sample as messages call it, by the columns that find it again in any artifact."""
    index = row.get("sample_index")
    return f"prompt {row.get('prompt_id')}" + ("" if index is None else f", sample {index}")


def row_name(kind: str, number: int, row: Mapping[str, Any]) -> str:
    """A row of the data as messages call it, counted from 0 in its file."""
    return f"{kind} {number} (prompt {row.get('prompt_id')})"


def check_finite(what: str, name: str, values: float | Sequence[float], remedy: str = "") -> None:
    """StageError unless the number, or each of a response's numbers, is finite."""
    advice = f": {remedy}" if remedy else ""
    if not isinstance(values, Sequence):
        if not math.isfinite(values):
            raise StageError(f"{what} is {values} for {name}{advice}")
        return
    # A sum is finite only if all of it is, and is quicker to look at.
    if math.isfinite(sum(values)):
        return
    for position, value in enumerate(values):
        if not math.isfinite(value):
            raise StageError(
                f"{what} is {value} at token {position} of the response, for {name}{advice}"
            )


def is_finite(value: Any) -> bool:
    """Whether it is a finite number, of any type; one that no float can hold is not."""
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:
        return False
