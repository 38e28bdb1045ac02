"""Some rows of a Parquet file without the others: what is shown is read, and what decides on it.

Only the columns that are asked for are decoded, a block of rows at a time, in the row groups that
the rows are in. A row group whose statistics rule a value out is never opened. So the time and the
memory of a page do not grow with the file.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.base.errors import LockstepError

BLOCK = 2048
Span = tuple[int, int]
"""Rows from a number up to another, the last one not included."""


def open_file(path: Path) -> pq.ParquetFile:
    """A file of which nothing but the description of its row groups has been read."""
    try:
        return pq.ParquetFile(path, memory_map=True)
    except FileNotFoundError:
        raise LockstepError(
            f"{path} does not exist: `lockstep run` computes it, or `dvc pull` fetches it"
        ) from None
    except (OSError, ValueError) as error:
        raise LockstepError(
            f"{path}: not readable as Parquet ({error}): `lockstep verify` checks whether it is "
            "damaged"
        ) from None


def columns_in(file: pq.ParquetFile, names: Sequence[str]) -> list[str]:
    """Those of the columns that the file has."""
    known = set(file.schema_arrow.names)
    return [name for name in names if name in known]


def groups(file: pq.ParquetFile) -> list[Span]:
    """The rows of each row group."""
    spans, start = [], 0
    for index in range(file.metadata.num_row_groups):
        stop = start + file.metadata.row_group(index).num_rows
        spans.append((start, stop))
        start = stop
    return spans


def possible(file: pq.ParquetFile, column: str, test: Callable[[Any, Any], bool]) -> list[Span]:
    """The row groups that may have a value, where `test` is asked about their least and largest."""
    spans = []
    for index, span in enumerate(groups(file)):
        statistics = _statistics(file, index, column)
        known = statistics is not None and statistics.has_min_max
        if not known or test(statistics.min, statistics.max):
            spans.append(span)
    return spans


def _statistics(file: pq.ParquetFile, group: int, column: str) -> Any:
    metadata = file.metadata.row_group(group)
    for index in range(metadata.num_columns):
        chunk = metadata.column(index)
        if chunk.path_in_schema == column:
            return chunk.statistics
    return None


def common(one: Sequence[Span], other: Sequence[Span]) -> list[Span]:
    """The rows that are in both; each is in order."""
    found, left, right = [], list(one), list(other)
    while left and right:
        start, stop = max(left[0][0], right[0][0]), min(left[0][1], right[0][1])
        if start < stop:
            found.append((start, stop))
        (left if left[0][1] <= right[0][1] else right).pop(0)
    return found


def batches(
    file: pq.ParquetFile, columns: Sequence[str], start: int, stop: int
) -> Iterator[pa.RecordBatch]:
    """The rows of a span in order, in blocks."""
    for index, (first, last) in enumerate(groups(file)):
        if last <= start or first >= stop:
            continue
        position = first
        for batch in _decoded(file, index, columns):
            low, high = max(start - position, 0), min(stop - position, len(batch))
            if low < high:
                yield batch.slice(low, high - low)
            position += len(batch)
            if position >= stop:
                return


def _decoded(file: pq.ParquetFile, group: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    try:
        yield from file.iter_batches(BLOCK, row_groups=[group], columns=list(columns))
    except (OSError, pa.ArrowException) as error:
        raise LockstepError(
            f"row group {group} cannot be read ({error}): `lockstep verify` says which file is "
            "damaged"
        ) from None


def beside(*streams: Iterator[pa.RecordBatch]) -> Iterator[tuple[pa.RecordBatch, ...]]:
    """The same rows of several files, whose blocks may end at different rows."""
    parts: list[Any] = [next(stream, None) for stream in streams]
    while all(part is not None for part in parts):
        size = min(len(part) for part in parts)
        yield tuple(part.slice(0, size) for part in parts)
        parts = [
            part.slice(size) if len(part) > size else next(stream, None)
            for part, stream in zip(parts, streams, strict=True)
        ]


def take(file: pq.ParquetFile, columns: Sequence[str], rows: Sequence[int]) -> list[dict[str, Any]]:
    """The rows with these numbers, which are in order, without columns that the file lacks."""
    wanted, taken = columns_in(file, columns), list[dict[str, Any]]()
    for first, last in groups(file):
        inside = [row for row in rows if first <= row < last]
        if not inside:
            continue
        position = inside[0]
        for batch in batches(file, wanted, inside[0], inside[-1] + 1):
            end = position + len(batch)
            indices = [row - position for row in inside if position <= row < end]
            taken += batch.take(pa.array(indices, pa.int64())).to_pylist() if indices else []
            position = end
    return taken
