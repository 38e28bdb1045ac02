"""Writing artifacts: the same content gives the same bytes, readable by others on a cluster."""

import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from stages.context import StageError
from stages.data.schema import columns_of, optional_fields

FILE_MODE = 0o644
FOLDER_MODE = 0o755
R = TypeVar("R", bound=Mapping[str, Any])
"""A kind of rows, of schema.py."""


def write_parquet(path: Path, rows: Iterable[R], kind: type[R]) -> None:
    """Rows of a kind, in the given order, without volatile metadata."""
    listed = [dict(row) for row in rows]
    present = {name for name in optional_fields(kind) if any(name in row for row in listed)}
    table = pa.Table.from_pylist(listed, schema=columns_of(kind, present))
    pq.write_table(table, path, compression="zstd", store_schema=False)
    path.chmod(FILE_MODE)


def read_parquet(path: Path, kind: type[R]) -> list[R]:
    """All rows, which are of that kind. (`read_table` would import pandas, which takes longer.)"""
    with pq.ParquetFile(path) as file:
        for column in columns_of(kind).names:
            if column not in file.schema_arrow.names:
                raise StageError(f"{path} has no column {column!r}: delete it and run `dvc repro`")
        rows: list[R] = file.read().to_pylist()
    return rows


def read_role(path: Path, kind: type[R], role: str, reader: str) -> list[R]:
    """The rows that prepare wrote for a role; StageError where a reader needs some and has none."""
    rows = read_parquet(path, kind)
    if not rows:
        raise StageError(
            f"there are no {role}, and {reader} needs them: {path.name} has no rows. Give the role "
            f"a source, a file {role}.* in prepare.folder or prepare.files.{role} (docs/data.md)"
        )
    return rows


def write_json(path: Path, value: Any) -> None:
    """Sorted keys, one key per line."""
    path.write_text(
        json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    path.chmod(FILE_MODE)


def without_nulls(value: Any) -> Any:
    """Parquet gives every struct the keys of all: those that are null were not there."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def canonical_json(value: Any) -> str:
    """The one text of a value: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def set_modes(folder: Path) -> None:
    """Make a folder readable for others: transformers writes weights with mode 0600.

    What has its mode already is not touched: a hash that was said of it still holds.
    """
    for root, _, files in os.walk(folder):
        modes = {Path(root): FOLDER_MODE, **{Path(root) / name: FILE_MODE for name in files}}
        for path, mode in modes.items():
            if stat.S_IMODE(path.stat().st_mode) != mode:
                path.chmod(mode)
