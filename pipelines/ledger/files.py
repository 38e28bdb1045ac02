"""The ledger's JSON files: each holds one frozen dataclass, and says which version of it.

What is read is what was written, or the reader is told so: a file that is torn, of another version
or with a key that is not known here is named in an error, with what to do, and stays as it is. Only
what is told apart by a version may change its meaning; whoever changes a class changes its VERSION.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from pydantic import TypeAdapter, ValidationError

from pipelines.base import atomic
from pipelines.base.errors import LockstepError


class LedgerFile(Protocol):
    """A dataclass that a file holds."""

    VERSION: ClassVar[int]


Value = TypeVar("Value", bound=LedgerFile)


class MissingFileError(LockstepError, FileNotFoundError):
    """A reader that expects removals catches it as it would any file that is gone."""


def write(path: Path, value: LedgerFile) -> None:
    values = {"version": value.VERSION, **_adapter(type(value)).dump_python(value)}
    atomic.write_text(path, json.dumps(values, indent=2, sort_keys=True, default=str) + "\n")


def load(kind: type[Value], path: Path) -> Value:
    """The value of a file that must be there."""
    value = read(kind, path)
    if value is None:
        raise MissingFileError(
            f"{path} is missing: run the same command again, or remove its folder"
        )
    return value


def read(kind: type[Value], path: Path) -> Value | None:
    """The file's value, or None where there is no such file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise _damaged(path, f"no JSON ({error})") from None
    if not isinstance(values, dict):
        raise _damaged(path, "no mapping")
    version = values.pop("version", None)
    if version != kind.VERSION:
        raise _foreign(path, f"version {version}, and this Lockstep reads version {kind.VERSION}")
    try:
        value: Value = _adapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise _damaged(path, f"no {kind.__name__}: `{where}`: {first['msg']}") from None
    if unknown := _unknown(values, _adapter(kind).dump_python(value)):
        raise _foreign(path, f"key `{unknown}`, which this Lockstep does not know")
    return value


@cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _unknown(written: Mapping[str, Any], known: Mapping[str, Any], prefix: str = "") -> str | None:
    """The first key of the file that the value has not taken."""
    for key, item in written.items():
        if key not in known:
            return f"{prefix}{key}"
        both = isinstance(item, dict) and isinstance(known[key], dict)
        if both and (unknown := _unknown(item, known[key], f"{prefix}{key}.")):
            return unknown
    return None


def _damaged(path: Path, what: str) -> LockstepError:
    return LockstepError(
        f"{path} is {what}: it was damaged, or something else wrote it. Restore it, or move "
        f"{path.parent} away; nothing was changed"
    )


def _foreign(path: Path, what: str) -> LockstepError:
    return LockstepError(
        f"{path} has {what}: finish or remove that job with the Lockstep that wrote it; nothing "
        "was changed"
    )
