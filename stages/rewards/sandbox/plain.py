"""Values that two processes can both make: what they are rebuilt from, and where to find them."""

from __future__ import annotations

import builtins
import collections
import dataclasses
import datetime
import decimal
import fractions
import importlib
import json
import pathlib
import queue
import statistics
import sys
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Items(list["Any"]):
    """In a message. No container, which would be shared."""


# What a plain value is rebuilt from.
PARTS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    int: lambda value: (int.__int__(value),),
    float: lambda value: (float.__float__(value),),
    str: lambda value: (str.__str__(value),),
    bytes: lambda value: (bytes.__getitem__(value, slice(None)),),
    type(NotImplemented): lambda _: (),
    type(Ellipsis): lambda _: (),
    complex: lambda value: (value.real, value.imag),
    range: lambda value: (value.start, value.stop, value.step),
    slice: lambda value: (value.start, value.stop, value.step),
    tuple: lambda value: (Items(tuple.__iter__(value)),),
    frozenset: lambda value: (Items(frozenset.__iter__(value)),),
    decimal.Decimal: lambda value: (decimal.Decimal.__str__(value),),
    fractions.Fraction: lambda value: (value._numerator, value._denominator),
    pathlib.PurePosixPath: lambda value: (pathlib.PurePath.__str__(value),),
    pathlib.PosixPath: lambda value: (pathlib.PurePath.__str__(value),),
    datetime.timedelta: lambda value: (value.days, value.seconds, value.microseconds),
    datetime.timezone: lambda value: (value.utcoffset(None),),
    datetime.datetime: lambda value: (*value.timetuple()[:6], value.microsecond, value.tzinfo),
    datetime.date: lambda value: (value.year, value.month, value.day),
    datetime.time: lambda value: (
        *(value.hour, value.minute, value.second, value.microsecond),
        value.tzinfo,
    ),
}


def _pairs(value: dict[Any, Any]) -> list[Any]:
    return [part for pair in dict.items(value) for part in pair]


# What a container holds; a kin of two of them is taken as the first.
CONTENT: dict[type, Callable[[Any], list[Any]]] = {
    collections.Counter: _pairs,
    collections.OrderedDict: lambda value: [
        part for pair in collections.OrderedDict.items(value) for part in pair
    ],
    collections.defaultdict: lambda value: [value.default_factory, *_pairs(value)],
    dict: _pairs,
    collections.deque: lambda value: [value.maxlen, *collections.deque.__iter__(value)],
    list: lambda value: list(list.__iter__(value)),
    set: lambda value: list(set.__iter__(value)),
    bytearray: lambda value: [bytes(value)],
}
PLAIN = {kind.__name__: kind for kind in (*PARTS, *CONTENT, bool, object, type(None))}
_ERRORS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception)
} | {
    kind.__name__: kind
    for kind in (
        dataclasses.FrozenInstanceError,
        decimal.DivisionByZero,
        decimal.InvalidOperation,
        json.JSONDecodeError,
        queue.Empty,
        queue.Full,
        statistics.StatisticsError,
    )
}
"""Classes that are the same on both sides."""


def plain_base(kind: type) -> type:
    """The nearest class above it that both sides have."""
    return next(base for base in kind.__mro__ if _is_plain(base))


def _is_plain(kind: type) -> bool:
    name = kind.__name__
    return PLAIN.get(name) is kind or _ERRORS.get(name) is kind


def fill(value: Any, kind: Any, content: list[Any]) -> None:
    if issubclass(kind, dict):
        if kind is collections.defaultdict:
            factory, *content = content
            vars(kind)["default_factory"].__set__(value, factory)
        kind.clear(value)
        for key, item in zip(content[::2], content[1::2], strict=True):
            kind.__setitem__(value, key, item)
    elif kind is collections.deque:
        kind.__init__(value, content[1:], content[0])
    elif kind is set:
        kind.clear(value)
        kind.update(value, content)
    else:
        kind.__setitem__(value, slice(None), content[0] if kind is bytearray else content)


def place_of(value: Any, *, anywhere: bool) -> tuple[str, str] | None:
    """Where both sides find it. What `anywhere` has, the judge may name and the program may not:
    it would be run by the judge.
    """
    if isinstance(value, type) and _is_plain(value):
        return "", value.__name__
    if not anywhere:
        return None
    if isinstance(value, types.ModuleType):
        return value.__name__, ""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(module, str) and module.partition(".")[0] in sys.stdlib_module_names:
        named = sys.modules.get(module)
        for part in str(name).split("."):
            named = getattr(named, part, None)  # type: ignore[assignment]
        if named is value and module != "__main__":
            return module, str(name)
    return None


def at_place(module: str, name: str, *, anywhere: bool) -> Any:
    if not module:
        return PLAIN.get(name) or _ERRORS[name]
    if not anywhere:
        raise ValueError("not for the judge")
    named = importlib.import_module(module)
    for part in name.split(".") if name else ():
        named = getattr(named, part)
    return named
