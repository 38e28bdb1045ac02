"""What a program may not do with the objects that the tests hand it.

It may use them. It may not get from them to the tests themselves, nor change what these do.
"""

from __future__ import annotations

import sys
import types

from stages.rewards.sandbox.plain import place_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_HANDED_OUT = {
    *("", "builtins", "collections", "enum", "functools", "itertools", "operator", "random"),
    *("queue", "re", "types", "unittest.mock", "BytesIO", "StringIO"),
}
"""Modules and classes of Python's: if the tests made such an object, the program may use it."""
_INSIDES = ("_", "gi_", "cr_", "ag_", "tb_", "f_", "co_", "func_")

_SAID_OF_ITSELF = ("__name__", "__qualname__", "__doc__", "__annotations__")
"""What a decorator takes over from a function."""


class AccessRefused(Exception):
    """The other side asked for what it must not have."""


def refuse_kind(on: Any) -> None:
    """Whatever is asked of it."""
    # What Python has, the program has itself; here it would reach the judge's descriptors.
    kind = on if isinstance(on, type) else type(on)
    place = place_of(kind, anywhere=True)
    if place is not None and (kind is on or _HANDED_OUT.isdisjoint(place)):
        raise AccessRefused("of what Python has")
    unittest = sys.modules.get("unittest")
    if unittest is not None and issubclass(kind, unittest.TestCase):
        raise AccessRefused("of a test: it could be skipped, or told what is equal")


def refuse_insides(what: str, on: Any, name: Any) -> None:
    """What leads from an object of the tests to the tests themselves, or changes what they do."""
    if what == "get" and name in _SAID_OF_ITSELF:
        return
    if not isinstance(name, str) or name.startswith(_INSIDES):
        raise AttributeError(name)
    # These look up whatever attributes their text names.
    kind = on if isinstance(on, type) else type(on)
    if name in ("format", "format_map") and issubclass(kind, str):
        raise AttributeError(name)
    # These set others, of a mock that would then say of itself how it was called.
    if name in ("configure_mock", "attach_mock", "mock_add_spec"):
        raise AttributeError(name)
    if what != "get":
        own = callable(getattr(type(on), name, None)) or callable(getattr(on, name, None))
        if own or isinstance(on, (type, types.FunctionType, types.MethodType)):
            raise AttributeError(name)
