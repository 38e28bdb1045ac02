"""Opening a source as a stream of numbered rows: json, jsonl, csv, parquet, arrow, or a hub's data.

However large a file, only a piece of it is in memory: a line, a few rows, a row group of Parquet.
json, jsonl and csv may be compressed with gzip. What is wrong with a file raises `RowError` with
the number of the row, or StageError where nothing of it can be read.
"""

import csv
import gzip
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from stages.context import StageError
from stages.contracts.sources import Source
from stages.data.formats.messages import RowError

Numbered = tuple[int, "dict[str, Any] | RowError"]
"""The number of a row's first line, or of the row where there are no lines, and the row; or what
is wrong with it, where others can still be read."""
ROWS_AT_A_TIME = 256
CHUNK = 1 << 20
LARGEST_ROW = 64 << 20
_OPENING, _SPACE, _BETWEEN = (re.compile(p) for p in (r"\s*\[", r"\s*", r"\s*,?\s*"))


def file_type(path: Path) -> str | None:
    """The type that a file's name tells: None of a file that holds no rows."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [".gz"]:
        suffixes.pop()
        return suffixes[-1] if suffixes and suffixes[-1] in _TEXTS else None
    return suffixes[-1] if suffixes and suffixes[-1] in (*_TEXTS, *_TABLES) else None


def rows_of(path: Path) -> Iterator[Numbered]:
    """The rows of a file, blank lines left out."""
    kind = file_type(path)
    if kind in _TABLES:
        yield from _TABLES[kind](path)
    elif kind in _TEXTS:
        opened = gzip.open if path.suffix.lower() == ".gz" else open
        with opened(path, "rb") as file:
            yield from _TEXTS[kind](file)  # type: ignore[arg-type]
    else:
        raise StageError(f"{path} is none of json, jsonl, csv, parquet and arrow")


def counted_in(path: Path) -> str:
    """What a row's number counts."""
    return "line" if file_type(path) in (".jsonl", ".csv") else "row"


def hub_rows(source: Source) -> Iterator[Numbered]:
    """The rows of a dataset at its commit, read as they are needed."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise StageError(
            f"{source.label} is read with the `datasets` package, which is not installed: "
            "pip install 'lockstep-rlhf[hub]'"
        ) from None
    try:
        rows = load_dataset(
            source.dataset,
            source.subset or None,
            revision=source.revision,
            split=source.split,
            streaming=True,
        )
        for number, row in enumerate(rows, start=1):
            yield number, dict(row)
    except RowError:
        raise
    except Exception as error:
        raise StageError(
            f"{source.label} cannot be read ({error}). Where no hub is reachable, download the "
            "dataset elsewhere, put its files under prepare.folder and name them with `path`"
        ) from error


def _lines(file: IO[bytes]) -> Iterator[Numbered]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield number, _object(line)


def _object(text: bytes) -> dict[str, Any] | RowError:
    try:
        value = json.loads(text)
    except UnicodeDecodeError as error:
        return RowError(f"it is not UTF-8 text ({error.reason} at byte {error.start})")
    except json.JSONDecodeError as error:
        return RowError(
            f"it is not JSON ({error.msg} at column {error.colno}): write one object a line"
        )
    return _checked(value)


def _checked(value: Any) -> dict[str, Any] | RowError:
    return value if isinstance(value, dict) else RowError("it is not a JSON object")


def _json(file: IO[bytes]) -> Iterator[Numbered]:
    """One list of objects; a file that starts with an object is taken for JSON lines."""
    first = b""
    while not first.strip():
        first = file.read(CHUNK)
        if not first:
            return
    if first.lstrip()[:1] == b"{":
        file.seek(0)
        yield from _lines(file)
        return
    if first.lstrip()[:1] != b"[":
        raise StageError(f"{file.name} holds no list: write a list of objects, or JSON lines")
    file.seek(0)
    text = io.TextIOWrapper(file, encoding="utf-8")
    try:
        yield from _elements(text)
    except UnicodeDecodeError as error:
        raise StageError(f"{file.name} is not UTF-8 text ({error.reason})") from None


def _elements(file: io.TextIOWrapper) -> Iterator[Numbered]:
    """The elements of a JSON list, parsed one by one as enough of the text is there."""
    decoder, text, at, number, want = json.JSONDecoder(), file.read(CHUNK), 0, 0, CHUNK
    at = _OPENING.match(text).end()  # type: ignore[union-attr]
    while True:
        at = (_BETWEEN if number else _SPACE).match(text, at).end()  # type: ignore[union-attr]
        if text[at : at + 1] == "]":
            return
        wrong = "the list is not closed"
        try:
            value, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            wrong, end = error.msg, len(text)
        # What ends where the text ends may go on in the next piece.
        if end < len(text):
            at, number, want = end, number + 1, CHUNK
            yield number, _checked(value)
            continue
        more = file.read(want) if len(text) - at < LARGEST_ROW else ""
        if not more:
            raise StageError(
                f"{file.name} row {number + 1} is not JSON ({wrong}), or it has more than "
                f"{LARGEST_ROW >> 20} MB: write a list of objects, or JSON lines"
            )
        text, at, want = text[at:] + more, 0, 2 * want


def _csv(file: IO[bytes]) -> Iterator[Numbered]:
    """Rows under a line of names; an empty cell is none."""
    csv.field_size_limit(min(sys.maxsize, LARGEST_ROW))
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    reader = csv.reader(text, strict=True)
    number = 1
    try:
        names = next(reader, None)
        if names is None:
            return
        if len(set(names)) != len(names) or not all(names):
            raise StageError(f"{text.name}: its first line names the columns, each once: {names}")
        number = reader.line_num + 1
        for cells in reader:
            if cells and len(cells) != len(names):
                wrong = f"it has {len(cells)} cells, and the first line {len(names)} names"
                yield number, RowError(wrong)
            elif cells:
                yield number, {n: cell or None for n, cell in zip(names, cells, strict=True)}
            number = reader.line_num + 1
    except csv.Error as error:
        raise StageError(f"{text.name} line {number} is not CSV ({error})") from None
    except UnicodeDecodeError as error:
        raise StageError(f"{text.name} line {number} is not UTF-8 text ({error.reason})") from None


def _parquet(path: Path) -> Iterator[Numbered]:
    import pyarrow.parquet as pq

    with _readable(path), pq.ParquetFile(path) as file:
        yield from _of_batches(file.iter_batches(batch_size=ROWS_AT_A_TIME))


def _arrow(path: Path) -> Iterator[Numbered]:
    """Arrow's file format, or its stream, which the `datasets` package writes."""
    import pyarrow as pa

    with _readable(path), pa.memory_map(str(path)) as file:
        try:
            opened = pa.ipc.open_file(file)
        except pa.ArrowInvalid:
            file.seek(0)
            yield from _of_batches(pa.ipc.open_stream(file))
        else:
            yield from _of_batches(
                opened.get_batch(index) for index in range(opened.num_record_batches)
            )


def _of_batches(batches: Any) -> Iterator[Numbered]:
    number = 0
    for batch in batches:
        for start in range(0, len(batch), ROWS_AT_A_TIME):
            for row in batch.slice(start, ROWS_AT_A_TIME).to_pylist():
                number += 1
                yield number, row


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Says which file it was that Arrow could not read."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise StageError(f"{path} cannot be read: {error}") from None


_TEXTS: dict[str | None, Callable[[IO[bytes]], Iterator[Numbered]]] = {
    ".jsonl": _lines,
    ".json": _json,
    ".csv": _csv,
}
_TABLES: dict[str | None, Callable[[Path], Iterator[Numbered]]] = {
    ".parquet": _parquet,
    ".arrow": _arrow,
}
