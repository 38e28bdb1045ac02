"""A row as reward sources see it: plain JSON, by the same names everywhere.

A rule sees one row: `prompt`, `response`, `answer`, `finish_reason`, `response_ids`, how many of
these are the policy's own as `num_tokens`, what an environment paid as `environment_reward`, and
the other columns of the source's row under `extra`.
Functions and servers see several as columns: the same in the plural, and each of the other columns
by its own name, null in rows that lack it. A column whose name is one of the plurals is hidden by
it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PLURALS = {
    "prompts": "prompt",
    "responses": "response",
    "answers": "answer",
    "finish_reasons": "finish_reason",
    "environment_rewards": "environment_reward",
    "response_ids": "response_ids",
    "prompt_ids": "prompt_id",
    "sample_indices": "sample_index",
}
"""Columns that every row has; `prompt_ids` are the names of the prompts, not their tokens."""
SHOWN = 80
Row = Mapping[str, Any]


class Unusable(Exception):
    """A row that a source cannot score, and why: something is missing or invalid."""


def given(row: Row) -> dict[str, Any]:
    """A row of rollouts as sources see it."""
    extra = json.loads(row.get("extra") or "{}")
    # What it observed between its turns is in `response_ids`, and none of its doing.
    mask, ids = row.get("loss_mask"), row.get("response_ids") or ()
    num_tokens = len(ids) if mask is None else sum(mask)
    named = {name: row.get(name) for name in PLURALS.values()}
    return {**named, "num_tokens": num_tokens, "extra": extra}


def column_names(rows: Iterable[Row]) -> list[str]:
    """All that a function may ask for: the plurals, and every other column of any row."""
    return [*PLURALS, *(name for name in other_columns(rows) if name not in PLURALS)]


def other_columns(rows: Iterable[Row]) -> list[str]:
    """The columns of the source's rows that have no meaning of their own."""
    return sorted({name for row in rows for name in row["extra"]})


def columns(rows: Sequence[Row], names: Iterable[str]) -> dict[str, list[Any]]:
    """Rows that are `given`, as columns."""
    return {
        name: [row[PLURALS[name]] if name in PLURALS else row["extra"].get(name) for row in rows]
        for name in names
    }


def list_of(extra: Row, name: str) -> list[Any] | None:
    """The list in a column, or its JSON, for CSV has nothing but text; None where there is none."""
    value = extra.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, list) else None


def name_of(row: Row) -> str:
    """A row as messages call it: by what finds it again, and by how its prompt begins."""
    index = row.get("sample_index")
    sample = "" if index is None else f", sample {index}"
    prompt = str(row.get("prompt"))
    shown = prompt if len(prompt) <= SHOWN else prompt[: SHOWN - 3] + "..."
    return f"prompt {row.get('prompt_id')}{sample} ({shown!r})"


def names_of(rows: Sequence[Row]) -> str:
    """Consecutive rows: the first and the last."""
    if len(rows) == 1:
        return name_of(rows[0])
    return f"{len(rows)} rows from {name_of(rows[0])} to {name_of(rows[-1])}"
