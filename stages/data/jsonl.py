"""Reading a user's JSON lines: what is wrong with them is named by file and line."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.context import StageError


@dataclass(frozen=True)
class Row:
    """One line of a file, with the place to point at."""

    file: str
    line: int
    values: dict[str, str]

    @property
    def place(self) -> str:
        return f"{self.file} line {self.line}"


def read_jsonl(path: Path, required: Sequence[str], optional: Sequence[str] = ()) -> list[Row]:
    """The rows of a file whose columns are text; blank lines are skipped."""
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
            rows.append(Row(path.name, number, _parse(path, number, line, required, optional)))
    if not rows:
        raise StageError(
            f"{path} is empty: it needs at least one JSON line with {_listed(required)}"
        )
    return rows


def _parse(
    path: Path, number: int, line: str, required: Sequence[str], optional: Sequence[str]
) -> dict[str, str]:
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
        if not isinstance(value[name], str):
            kind = type(value[name]).__name__
            raise StageError(f"{place}: {name!r} is {kind}, not text: put it in quotes")
        columns[name] = value[name]
    if not columns["prompt"]:
        raise StageError(f"{place}: 'prompt' is empty: write a prompt or drop the row")
    return columns


def _listed(names: Sequence[str]) -> str:
    quoted = [repr(name) for name in names]
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)
