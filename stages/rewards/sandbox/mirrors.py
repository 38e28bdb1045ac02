"""Mirrors of objects that live in the other process, and of their classes.

A mirror of an object is equal to no plain value, whatever its class says of itself: what it is
compared with stays unknown to its owner. The owner compares its own objects with each other, if
their classes are related.
"""

from __future__ import annotations

import collections

from stages.rewards.sandbox.plain import plain_base

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from stages.rewards.sandbox.link import Link

link: Link = None  # type: ignore[assignment]
"""The way to the owner: there is one in a process, set when it is made."""


def _dunder(*names: str) -> set[str]:
    return {f"__{name}__" for text in names for name in text.split()}


COMPARISONS = _dunder("eq ne lt le gt ge")
_BINARY = "add sub mul truediv floordiv mod divmod pow matmul lshift rshift and or xor"
OPERATORS = _dunder(
    *(f"{prefix}{name}" for name in _BINARY.split() for prefix in ("", "r", "i")),
    "neg pos abs invert round trunc floor ceil bool len",
)
_DIFFERENCES = _dunder(*(f"{prefix}{name}" for name in ("sub", "xor") for prefix in ("", "r", "i")))
_VALUE_OF = _dunder("int float complex index bytes")
"""Of a kin of a plain type it is the value that it holds."""
_ANSWERS = _dunder(
    "str repr format call getitem setitem delitem missing reversed iter next",
    "enter exit aiter anext aenter aexit",
)
SPECIAL = COMPARISONS | OPERATORS | _VALUE_OF | _ANSWERS | _dunder("contains hash")
"""Special methods that a mirror has where its object has them."""
_WITH_METHODS = (dict, list, collections.deque)
"""Plain types whose methods a subclass may replace. Those of the others would be told what a test
expects: whether a text starts with it, whether a set is within it.
"""


def _forward(name: str) -> Any:
    def method(self: Any, /, *arguments: Any, **named: Any) -> Any:
        return link.ask("special", self, name, *arguments, **named)

    return method


class MirrorClass(type):
    """The class of a class that lives on the other side."""

    def __call__(cls, /, *arguments: Any, **named: Any) -> Any:
        return link.ask("call", cls, *arguments, **named)

    def __getattr__(cls, name: str) -> Any:
        return link.ask("get", cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        if name.startswith("__"):
            type.__setattr__(cls, name, value)
        else:
            link.ask("set", cls, name, value)

    @property
    def __doc__(cls) -> Any:  # type: ignore[override]
        return link.ask("get", cls, "__doc__")

    __iter__ = _forward("__iter__")
    __len__ = _forward("__len__")
    __getitem__ = _forward("__getitem__")

    def __bool__(cls) -> bool:
        return True


class Mirror:
    """What all mirrors of objects have."""

    def __getattr__(self, name: str) -> Any:
        return link.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            object.__setattr__(self, name, value)
        else:
            link.ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        link.ask("delete", self, name)

    def __copy__(self) -> Any:
        return link.ask("copy", self)

    def __deepcopy__(self, _: Any) -> Any:
        return link.ask("deepcopy", self)

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        return link.ask("get", self, "__dict__")


class ObjectMirror(Mirror):
    """A mirror that holds no plain value."""

    def __contains__(self, item: Any) -> bool:
        if isinstance(item, Mirror):
            return bool(link.ask("special", self, "__contains__", item))
        # What is looked for is what a test expects: the owner neither sees it nor says yes.
        return any(item is one or item == one for one in self)  # type: ignore[attr-defined]

    def __str__(self) -> str:
        return str(link.ask("special", self, "__str__"))

    def __repr__(self) -> str:
        return str(link.ask("special", self, "__repr__"))


class Awaited:
    """The rest of what a coroutine has. Its owner runs it to the end in one go."""

    def send(self, _: Any) -> Any:
        raise StopIteration(link.ask("await", self))

    def throw(self, error: Any, *_: Any) -> Any:
        raise error

    def close(self) -> None:
        pass

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self.send(None)


def _operate(name: str) -> Any:
    """An operator. A test may subtract what it expects: the difference is not for the owner to say.

    So where a plain value takes part, a kin of a plain type is taken as that type, and what any
    other object gives must be an object again, of which no operator makes a plain value either. Of
    a difference, nothing else does: it can be compared with other objects of its owner's.
    """

    def method(self: Any, /, *others: Any) -> Any:
        guarded = id(self) in link.derived or not all(
            isinstance(other, Mirror) and id(other) not in link.derived for other in others
        )
        if guarded and (base := plain_base(type(self))) is not object:
            return getattr(base, name)(self, *others)
        result = link.ask("special", self, name, *others)
        if guarded and isinstance(result, Mirror) and plain_base(type(result)) is object:
            link.derived.add(id(result))
            if name in _DIFFERENCES or any(id(one) in link.differences for one in (self, *others)):
                link.differences.add(id(result))
        elif guarded and result is not NotImplemented:
            raise TypeError("an object's operator made a plain value of another plain value")
        return result

    return method


def _attribute(name: str) -> Any:
    return property(lambda self: link.ask("get", self, name))


def _compare(name: str) -> Any:
    def method(self: Any, other: Any) -> Any:
        related = isinstance(other, Mirror) and (
            isinstance(other, type(self)) or isinstance(self, type(other))
        )
        # While a message is read, its sets and dicts are filled: their keys are not the same.
        if not related or link.receiving:
            return NotImplemented
        return link.ask("special", self, name, other)

    return method


def _hash_of_mirror(self: Any) -> int:
    return link.codec.hash_of(self)


def methods_of(kind: type) -> list[str]:
    """What the other side learns of a class, beside its name and its bases."""
    methods = [name for name, method in vars(kind).items() if name in SPECIAL and method]
    methods += [name for name in vars(kind) if name[:1] != "_"]
    return [*methods, "__await__"] if hasattr(kind, "__await__") else methods


def mirror_class(name: str, bases: Iterable[type], methods: list[str]) -> MirrorClass:
    """The mirror of a class, of which its owner says that it has these methods."""
    above = [base for base in bases if base is not object] or [ObjectMirror]
    kin = not all(issubclass(base, ObjectMirror) for base in above)
    space: dict[str, Any] = {"__module__": "candidate", "__doc__": _attribute("__doc__")}
    for method in methods:
        if "__await__" in methods and method in vars(Awaited):
            continue
        if method in _ANSWERS:
            space[method] = _forward(method)
        elif method in OPERATORS or (method in _VALUE_OF and not kin):
            space[method] = _operate(method)
        elif method in COMPARISONS and not kin:
            space[method] = _compare(method)
        elif method == "__hash__" and not kin:
            space[method] = _hash_of_mirror
        elif method[:1] != "_" and any(
            issubclass(base, _WITH_METHODS) and hasattr(base, method) for base in above
        ):
            space[method] = _attribute(method)
    if not any(issubclass(base, Mirror) for base in above):
        above.insert(0, Mirror)
    if "__await__" in methods:
        above.insert(0, Awaited)
    return MirrorClass(str(name), tuple(above), space)
