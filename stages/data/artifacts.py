"""Writing artifacts: the same content gives the same bytes, readable by others on a cluster."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.context import StageError

FILE_MODE = 0o644
FOLDER_MODE = 0o755


def write_parquet(path: Path, rows: Iterable[Mapping[str, Any]], schema: pa.Schema) -> None:
    """Rows in the given order, under the given schema, without volatile metadata."""
    table = pa.Table.from_pylist([dict(row) for row in rows], schema=schema)
    pq.write_table(table, path, compression="zstd", store_schema=False)
    path.chmod(FILE_MODE)


def read_parquet(path: Path) -> list[dict[str, Any]]:
    """All rows, as dictionaries. (`read_table` would import pandas, which takes longer.)"""
    with pq.ParquetFile(path) as file:
        rows: list[dict[str, Any]] = file.read().to_pylist()
    return rows


def read_role(path: Path, role: str, reader: str) -> list[dict[str, Any]]:
    """The rows that prepare wrote for a role; StageError where a reader needs some and has none."""
    rows = read_parquet(path)
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


def canonical_json(value: Any) -> str:
    """The one text of a value: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def set_modes(folder: Path) -> None:
    """Make a folder readable for others: transformers writes weights with mode 0600."""
    for root, _, files in os.walk(folder):
        Path(root).chmod(FOLDER_MODE)
        for name in files:
            (Path(root) / name).chmod(FILE_MODE)
