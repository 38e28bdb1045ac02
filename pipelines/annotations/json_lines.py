"""Files of JSON lines that are only appended to.

A line that a kill has cut off stays where it is; it is named, and counts as nothing. A line that
was damaged in any other way is an error.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelines.base.errors import LockstepError

_TORN = {"kind": "torn"}
"""Follows a line that was cut off, so that it is not taken for damage."""


def damaged(path: Path, number: int, why: str) -> LockstepError:
    return LockstepError(
        f"{path} line {number} cannot be read ({why}): files of annotations are only appended to; "
        "restore it from git or a backup, or remove that line"
    )


def append_line(path: Path, line: str) -> None:
    """Add a line at the end, whole and on disk; the lock of the file is held."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        data = f"{_mending(path)}{line}\n".encode()
        while data:
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def read_lines(path: Path, notes: list[str]) -> Iterator[tuple[int, Any]]:
    """The numbered values of a file of JSON lines; what was cut off goes to the notes."""
    cut: list[int] = []
    for number, line in enumerate(_lines(path), start=1):
        value = _whole(line)
        if value is None:
            cut.append(number)
        elif value == _TORN:
            notes += [_named(path, other) for other in cut]
            cut.clear()
        elif cut:
            raise damaged(path, cut[0], "it is not JSON")
        else:
            yield number, value
    notes += [_named(path, number) for number in cut]


def _named(path: Path, number: int) -> str:
    return f"{path} line {number} was cut off: it is kept, and counts as nothing"


def _lines(path: Path) -> list[bytes]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    return content.removesuffix(b"\n").split(b"\n") if content else []


def _whole(line: bytes) -> Any | None:
    """The object of a line; None where it is not a whole one."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _mending(path: Path) -> str:
    """What has to come between the end of a file and a new line: an end, and a mark."""
    written = path.read_bytes()
    ending = "" if not written or written.endswith(b"\n") else "\n"
    lines = _lines(path)
    torn = bool(lines) and _whole(lines[-1]) is None
    return ending + (f"{json.dumps(_TORN)}\n" if torn else "")
