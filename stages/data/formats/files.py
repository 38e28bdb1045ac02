"""Opening a source as a stream of numbered rows: a file of one of `TYPES`, or a hub's data.

However large a file, only a piece of it is in memory: a line, a few rows, a row group of Parquet.
Files of text may be compressed. What is wrong with a row comes as a `RowError` in its place;
StageError where nothing more of the file can be read.
"""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from stages.context import StageError
from stages.contracts.sources import Source
from stages.data.row_error import RowError

Numbered = tuple[int, "dict[str, Any] | RowError"]
"""The number of a row's first line, or of the row where there are no lines, and the row; or what
is wrong with it, where others can still be read."""
ROWS_AT_A_TIME = 256
CHUNK = 1 << 20
LARGEST_ROW = 64 << 20
_OPENING, _SPACE, _BETWEEN = (re.compile(p) for p in (r"\s*\[", r"\s*", r"\s*,?\s*"))
_NO_VALUE = (ValueError, ArithmeticError, LookupError)
"""Raised where Python has no value for one of Arrow: no text, no date, no zone of that name."""
_NOT_UTF8 = "is not UTF-8 text: save the file as UTF-8"


def file_type(path: Path) -> str | None:
    """The type that a file's name tells: None of a file that holds no rows."""
    *before, last = [None, *(suffix.lower() for suffix in path.suffixes)]
    if last in _PACKED:
        return before[-1] if before[-1] in _TEXTS else None
    return last if last in (*_TEXTS, *_TABLES) else None


def rows_of(path: Path) -> Iterator[Numbered]:
    """The rows of a file, blank lines left out."""
    kind = file_type(path)
    if kind in _TABLES:
        yield from _TABLES[kind](path)
    elif kind in _TEXTS:
        with _readable(path), _unpacked(path) as file:
            yield from _TEXTS[kind](file, path)
    else:
        raise StageError(f"{path} is no file of a type that is read: {TYPES}")


def counted_in(path: Path) -> str:
    """What a row's number counts."""
    kind = file_type(path)
    if kind != ".json":
        return "line" if kind in _TEXTS else "row"
    with _readable(path), _unpacked(path) as file:
        return "line" if _first_byte(file) == b"{" else "row"


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
    except Exception as error:
        raise StageError(
            f"{source.label} cannot be read ({error}). Where no hub is reachable, download the "
            "dataset elsewhere, put its files under prepare.folder and name them with `path`"
        ) from error


def _unpacked(path: Path) -> IO[bytes]:
    unpack = _PACKED.get(path.suffix.lower())
    file: IO[bytes] = unpack(path) if unpack else path.open("rb")
    return file


def _zstd(path: Path) -> IO[bytes]:
    import pyarrow as pa

    return io.BufferedReader(pa.input_stream(str(path), compression="zstd"))


def _lines(file: IO[bytes], _path: Path) -> Iterator[Numbered]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield number, _object(line)


def _object(text: bytes) -> dict[str, Any] | RowError:
    try:
        value = json.loads(text, object_pairs_hook=_each_name_once)
    except RowError as error:
        return error
    except UnicodeDecodeError as error:
        return RowError(f"it {_NOT_UTF8} ({error.reason} at byte {error.start})")
    except json.JSONDecodeError as error:
        return RowError(
            f"it is not JSON ({error.msg} at column {error.colno}): write one object a line"
        )
    except (ValueError, RecursionError) as error:
        return RowError(f"its JSON cannot be read ({error})")
    return _checked(value)


def _each_name_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    named = dict(pairs)
    if len(named) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RowError(f"it has {twice!r} twice in one object: keep one of them")
    return named


def _checked(value: Any) -> dict[str, Any] | RowError:
    if isinstance(value, dict | RowError):
        return value
    return RowError("it is not a JSON object")


def _json(file: IO[bytes], path: Path) -> Iterator[Numbered]:
    """One list of objects; a file that starts with an object is taken for JSON lines."""
    with _unpacked(path) as ahead:
        first = _first_byte(ahead)
    if first == b"{":
        yield from _lines(file, path)
    elif first == b"[":
        try:
            yield from _elements(io.TextIOWrapper(file, encoding="utf-8-sig"), path)
        except UnicodeDecodeError as error:
            raise StageError(f"{path} {_NOT_UTF8} ({error.reason})") from None
    elif first:
        raise StageError(f"{path} holds no list: write a list of objects, or JSON lines")


def _first_byte(file: IO[bytes]) -> bytes:
    """The first that is neither space nor a mark of the encoding; none of a blank file."""
    piece = file.read(CHUNK).removeprefix(codecs.BOM_UTF8)
    while piece and not piece.strip():
        piece = file.read(CHUNK)
    return piece.lstrip()[:1]


def _elements(file: io.TextIOWrapper, path: Path) -> Iterator[Numbered]:
    """The elements of a JSON list, parsed one by one as enough of the text is there."""
    strict, lenient = json.JSONDecoder(object_pairs_hook=_each_name_once), json.JSONDecoder()
    text, number, want = file.read(CHUNK), 0, CHUNK
    while not text.strip():
        text = file.read(CHUNK)
    at = _OPENING.match(text).end()  # type: ignore[union-attr]
    while True:
        at = (_BETWEEN if number else _SPACE).match(text, at).end()  # type: ignore[union-attr]
        if text[at : at + 1] == "]":
            _check_nothing_follows(text[at + 1 :], file, path)
            return
        wrong = "the list is not closed"
        try:
            value, end = strict.raw_decode(text, at)
        except RowError as error:
            value, end = error, _end(lenient, text, at)
        except json.JSONDecodeError as error:
            wrong, end = error.msg, len(text)
        except (ValueError, RecursionError) as error:
            raise StageError(f"{path} row {number + 1} cannot be read ({error})") from None
        # What ends where the text ends may go on in the next piece.
        if end < len(text):
            at, number, want = end, number + 1, CHUNK
            yield number, _checked(value)
            continue
        more = file.read(want) if len(text) - at < LARGEST_ROW else ""
        if not more:
            raise StageError(
                f"{path} row {number + 1} is not JSON ({wrong}), or it has more than "
                f"{LARGEST_ROW >> 20} MB: write a list of objects, or JSON lines"
            )
        text, at, want = text[at:] + more, 0, 2 * want


def _end(decoder: json.JSONDecoder, text: str, at: int) -> int:
    """Where an element ends; with the text, where it does not."""
    try:
        return decoder.raw_decode(text, at)[1]
    except json.JSONDecodeError:
        return len(text)


def _check_nothing_follows(text: str, file: io.TextIOWrapper, path: Path) -> None:
    while not text.strip():
        text = file.read(CHUNK)
        if not text:
            return
    raise StageError(
        f"{path} goes on after the end of its list, with {text.strip()[:20]!r}: write one "
        "list per file, or JSON lines"
    )


def _csv(file: IO[bytes], path: Path, comma: str = ",") -> Iterator[Numbered]:
    """Rows under a line of names; an empty cell is none."""
    csv.field_size_limit(min(sys.maxsize, LARGEST_ROW))
    # Bytes that are no text come through, so that the row that has them can be named.
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="", errors="surrogateescape")
    reader = csv.reader(text, delimiter=comma, strict=True)
    number = 1
    try:
        names = next(reader, None)
        if names is None:
            return
        if not is_text("".join(names)):
            raise StageError(f"{path} line 1 {_NOT_UTF8}")
        if len(set(names)) != len(names) or not all(names):
            raise StageError(f"{path}: its first line names the columns, each once: {names}")
        number = reader.line_num + 1
        for cells in reader:
            if cells and len(cells) != len(names):
                wrong = f"it has {len(cells)} cells, and the first line {len(names)} names"
                yield number, RowError(wrong)
            elif not is_text("".join(cells)):
                yield number, RowError(f"it {_NOT_UTF8}")
            elif cells:
                yield number, {n: cell or None for n, cell in zip(names, cells, strict=True)}
            number = reader.line_num + 1
    except csv.Error as error:
        raise StageError(f"{path} line {number} is not CSV ({error})") from None


def is_text(text: str) -> bool:
    """Whether it can be written as UTF-8; half a character cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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
            yield from _of_batches(_to_the_end(file, path))
        else:
            yield from _of_batches(
                opened.get_batch(index) for index in range(opened.num_record_batches)
            )


def _to_the_end(file: Any, path: Path) -> Iterator[Any]:
    """The batches of a stream; StageError where its end is missing, or is not that of the file.

    A stream that was cut between two batches can be read like a shorter one, but for the mark that
    its writer puts at the end.
    """
    import pyarrow as pa

    stream = pa.ipc.open_stream(file)
    read = file.tell()
    for batch in stream:
        yield batch
        read = file.tell()
    if file.tell() == read:
        raise StageError(f"{path} was cut: its end mark is missing. Copy it again")
    if file.tell() < file.size():
        raise StageError(f"{path} goes on after the end of its stream: write one stream per file")


def _of_batches(batches: Any) -> Iterator[Numbered]:
    number = 0
    for batch in batches:
        for start in range(0, len(batch), ROWS_AT_A_TIME):
            for row in _as_rows(batch.slice(start, ROWS_AT_A_TIME)):
                number += 1
                yield number, row


def _as_rows(batch: Any) -> "list[dict[str, Any] | RowError]":
    names = batch.schema.names
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        return [RowError(f"there are two columns {twice!r}: keep one of them")] * len(batch)
    try:
        rows: list[dict[str, Any] | RowError] = batch.to_pylist()
        return rows
    except _NO_VALUE:  # one of them: each by itself tells which
        if len(batch) == 1:
            return [_what_cannot_be_read(batch)]
        return [row for at in range(len(batch)) for row in _as_rows(batch.slice(at, 1))]


def _what_cannot_be_read(batch: Any) -> RowError:
    """Which column of the one row it is, and why."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            column.to_pylist()
        except _NO_VALUE as error:
            return RowError(f"{name!r} is {column.type}, and cannot be read ({error})")
    return RowError("it cannot be read")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Says which file it was that could not be read."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise StageError(f"{path} cannot be read: {error}") from None


_TEXTS: dict[str | None, Callable[[IO[bytes], Path], Iterator[Numbered]]] = {
    ".json": _json,
    ".jsonl": _lines,
    ".csv": _csv,
    ".tsv": partial(_csv, comma="\t"),
}
_TABLES: dict[str | None, Callable[[Path], Iterator[Numbered]]] = {
    ".parquet": _parquet,
    ".arrow": _arrow,
}
_PACKED: dict[str | None, Callable[[Path], Any]] = {
    ".gz": gzip.GzipFile,
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _zstd,
}
TYPES = (
    f"{', '.join(map(str, _TEXTS))} (also with {', '.join(map(str, _PACKED))} behind it), "
    f"{' and '.join(map(str, _TABLES))}"
)
"""The types that are read, in words."""
