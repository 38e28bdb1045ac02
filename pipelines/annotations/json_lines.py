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
    cut = _cut_off(path)
    if cut is not None:
        line = f"\n{'' if _whole(cut) else json.dumps(_TORN) + chr(10)}{line}"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        data = f"{line}\n".encode()
        while data:
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def read_lines(path: Path, notes: list[str]) -> Iterator[tuple[int, Any]]:
    """The numbered values of a file of JSON lines; what was cut off goes to the notes."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    is_open = bool(lines[-1])  # the last line has no end
    if not is_open:
        lines.pop()
    num_lines = len(lines)
    for number, line in enumerate(lines, start=1):
        if not line.strip() or _whole(line) == _TORN:
            continue
        value = _whole(line)
        if value is not None:
            yield number, value
        elif (is_open and number == num_lines) or _whole(lines[number % num_lines]) == _TORN:
            notes.append(f"{path} line {number} was cut off: it is kept, and counts as nothing")
        else:
            raise damaged(path, number, "it is not JSON")


def _whole(line: bytes) -> Any | None:
    """The object of a line; None where it is not a whole one."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _cut_off(path: Path) -> bytes | None:
    """What follows the last end of a line; None: nothing does."""
    try:
        rest = path.read_bytes().rpartition(b"\n")[2]
    except FileNotFoundError:
        return None
    return rest or None
