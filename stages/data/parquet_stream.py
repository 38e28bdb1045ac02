"""Parquet written row by row with bounded memory: the same rows give the same bytes.

Row groups end after so many rows or so much text and so many tokens, counted over the rows
themselves; how many rows are handed over at a time changes nothing. Sorted rows go through buckets
on disk first, by the leading digits of what they are sorted by; one bucket is sorted at a time.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.data.artifacts import FILE_MODE

Row = Mapping[str, Any]
ROWS_IN_GROUP = 16384
BYTES_IN_GROUP = 16 << 20
NUM_BUCKETS = 64


class ParquetStream:
    """Rows in the order in which they come."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._schema = schema
        self._path = path
        self._writer = pq.ParquetWriter(path, schema, compression="zstd", store_schema=False)
        self._pending: list[pa.Table] = []
        self._num_rows = 0
        self._num_bytes = 0

    def write(self, rows: Sequence[Row]) -> None:
        start = 0
        for index, row in enumerate(rows):
            self._num_rows += 1
            self._num_bytes += sum(map(_size, row.values()))
            if self._num_rows >= ROWS_IN_GROUP or self._num_bytes >= BYTES_IN_GROUP:
                self._keep(rows[start : index + 1])
                self._end_group()
                start = index + 1
        self._keep(rows[start:])

    def close(self) -> None:
        if self._pending:
            self._end_group()
        self._writer.close()
        self._path.chmod(FILE_MODE)

    def _keep(self, rows: Sequence[Row]) -> None:
        if rows:
            self._pending.append(pa.Table.from_pylist(list(map(dict, rows)), schema=self._schema))

    def _end_group(self) -> None:
        group = pa.concat_tables(self._pending).combine_chunks()
        self._writer.write_table(group, row_group_size=len(group))
        self._pending, self._num_rows, self._num_bytes = [], 0, 0


class SortedParquetStream:
    """Rows sorted by a column of hexadecimal digits that no two of them share."""

    def __init__(self, path: Path, schema: pa.Schema, by: str, scratch: Path) -> None:
        self._path, self._schema, self._by, self._folder = path, schema, by, scratch
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        self._open = ExitStack()
        self._buckets: dict[int, Any] = {}

    def write(self, rows: Sequence[Row]) -> None:
        parts: dict[int, list[Row]] = {}
        for row in rows:
            parts.setdefault(int(row[self._by][:4], 16) * NUM_BUCKETS >> 16, []).append(row)
        for bucket, part in parts.items():
            if bucket not in self._buckets:
                file = pa.OSFile(str(self._file(bucket)), "wb")
                writer = pa.ipc.new_stream(self._open.enter_context(file), self._schema)
                self._buckets[bucket] = self._open.enter_context(writer)
            table = pa.Table.from_pylist(list(map(dict, part)), schema=self._schema)
            self._buckets[bucket].write_table(table)

    def close(self) -> None:
        self._open.close()
        stream = ParquetStream(self._path, self._schema)
        for bucket in sorted(self._buckets):
            with pa.OSFile(str(self._file(bucket)), "rb") as file:
                table = pa.ipc.open_stream(file).read_all().sort_by(self._by)
            for batch in table.to_batches(max_chunksize=256):
                stream.write(batch.to_pylist())
        stream.close()
        shutil.rmtree(self._folder)

    def _file(self, bucket: int) -> Path:
        return self._folder / f"{bucket}.arrow"


@contextmanager
def streaming(
    path: Path, schema: pa.Schema, sorted_by: str | None, scratch: Path
) -> Iterator[ParquetStream | SortedParquetStream]:
    """A file to write rows to; it is whole when this ends well."""
    stream = (
        SortedParquetStream(path, schema, sorted_by, scratch / path.stem)
        if sorted_by
        else ParquetStream(path, schema)
    )
    yield stream
    stream.close()


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    return 4 * len(value) if isinstance(value, list) else 8
