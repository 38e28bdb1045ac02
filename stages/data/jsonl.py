"""Reading a user's JSON lines: what is wrong with them is named by file and line."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stages.context import StageError
from stages.data.artifacts import canonical_json


@dataclass(frozen=True)
class Row:
    """One line of a file, with the place to point at."""

    file: str
    line: int
    values: dict[str, Any]
    """Text, unless the column was read as another kind."""
    extra: str = "{}"
    """The other columns, as a JSON object."""

    @property
    def place(self) -> str:
        return f"{self.file} line {self.line}"


@dataclass(frozen=True)
class Kind:
    """What a column holds, and how to say so."""

    name: str
    holds: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


TEXT = Kind("text in quotes", lambda value: isinstance(value, str))
NUMBER = Kind("a number, true or false", _is_number)
TEXTS = Kind(
    "a list of texts",
    lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
)
NUMBERS = Kind(
    "a list of numbers, true or false",
    lambda value: isinstance(value, list) and all(map(_is_number, value)),
)


def read_jsonl(
    path: Path,
    required: Sequence[str],
    optional: Sequence[str] = (),
    kinds: Mapping[str, Kind] = MappingProxyType({}),
) -> list[Row]:
    """The rows of a file, without blank lines; columns are text unless `kinds` says otherwise."""
    if not path.is_file():
        raise StageError(
            f"{path} is missing: prepare.source is 'files', which reads JSON lines with "
            f"{_listed(required)} from it. Add the file, or set prepare.folder to where it is."
        )
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise StageError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start})"
        ) from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            values, extra = _parse(path, number, line, required, optional, kinds)
            rows.append(Row(path.name, number, values, extra))
    if not rows:
        raise StageError(
            f"{path} is empty: it needs at least one JSON line with {_listed(required)}"
        )
    return rows


def _parse(
    path: Path,
    number: int,
    line: str,
    required: Sequence[str],
    optional: Sequence[str],
    kinds: Mapping[str, Kind],
) -> tuple[dict[str, Any], str]:
    place = f"{path} line {number}"
    try:
        value: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise StageError(
            f"{place} is not JSON ({error.msg} at column {error.colno}): write one object a line"
        ) from None
    if not isinstance(value, dict):
        raise StageError(f"{place} is not a JSON object: write one with {_listed(required)}")
    columns = {}
    for name in (*required, *optional):
        if value.get(name) is None:
            if name in required:
                raise StageError(f"{place} has no {name!r}: each row needs {_listed(required)}")
            continue
        kind = kinds.get(name, TEXT)
        if not kind.holds(value[name]):
            found = type(value[name]).__name__
            raise StageError(f"{place}: {name!r} is {found}: write {kind.name}")
        columns[name] = value[name]
    if not columns["prompt"]:
        raise StageError(f"{place}: 'prompt' is empty: write a prompt or drop the row")
    others = {name: value[name] for name in value.keys() - {*required, *optional}}
    return columns, canonical_json(others)


def _listed(names: Sequence[str]) -> str:
    quoted = [repr(name) for name in names]
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)
