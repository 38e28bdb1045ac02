"""How values go into a message and come out of one. A value is one of these:

- plain: numbers, texts, tuples, fractions and the like are rebuilt from what they hold;
- a container: lists, dicts, sets and their kin are numbered. Both sides have one, and each message
  brings what has changed in them, so an argument that is changed in place changes for the caller;
- an object: it stays where it is. The other side has a mirror of it, whose class mirrors its class:
  same name, same bases, and special methods that ask the owner. A subclass of a plain type mirrors
  as one, too, and holds the plain value, with which it is compared.
"""

from __future__ import annotations

import contextlib
import types

from stages.rewards.sandbox.containers import Containers
from stages.rewards.sandbox.mirrors import MirrorClass, ObjectMirror, methods_of, mirror_class
from stages.rewards.sandbox.plain import (
    CONTENT,
    PARTS,
    PLAIN,
    Items,
    at_place,
    place_of,
    plain_base,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

_EXACT_IN_JSON = 1 << 53


class Codec:
    """What one side knows of the values that both have seen."""

    def __init__(self, *, is_judge: bool) -> None:
        self._is_judge = is_judge
        self._last_number = 0 if is_judge else 1
        self._mine: dict[int, Any] = {}
        self._theirs: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        """By `id`, of all that the other tables hold."""
        self._containers = Containers(self._numbers, self._encode, self._decode)
        self._hashes: dict[int, int] = {}
        """Of mirrors whose class defines one."""
        self._classes: list[Any] = []
        """Descriptions that the next message takes along."""

    def pack(self, values: Iterable[Any]) -> list[Any]:
        """Classes that are new, containers that changed or are gone, and the values."""
        body = [self._encode(value) for value in values]
        changed = self._containers.changes()
        gone = self._containers.forget_unused()
        classes, self._classes = self._classes, []
        return [classes, changed, body, gone]

    def unpack(
        self, classes: list[Any], changed: list[Any], body: list[Any], gone: list[int]
    ) -> list[Any]:
        for number, name, bases, methods in classes:
            self._know(number, mirror_class(name, map(self._decode, bases), methods))
        self._containers.apply(changed)
        values = [self._decode(part) for part in body]
        for number in gone:
            self._containers.drop(number)
        return values

    def has_handed_out(self, value: Any) -> bool:
        """Whether the other side was given this object, to be used and not rebuilt."""
        number = self._numbers.get(id(value), 0)
        kin = self._containers.values.get(number) is value and type(value) not in CONTENT
        return kin or self._mine.get(number) is value

    def _encode(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if abs(value) < _EXACT_IN_JSON else ["int", format(value, "x")]
        if kind is float:
            return ["float", value.hex()]
        if kind is bytes:
            return ["bytes", value.hex()]
        if kind in PARTS:
            return ["of", kind.__name__, [self._encode(part) for part in PARTS[kind](value)]]
        if kind is Items:
            return ["items", [self._encode(item) for item in value]]
        if isinstance(value, (types.TracebackType, types.FrameType)):
            return None
        if self._is_judge and isinstance(value, type) and (place := place_of(value, anywhere=True)):
            return ["place", *place]
        if (number := self._numbers.get(id(value))) is not None:
            if number in self._theirs:
                return ["yours", number]
            return ["shared" if number in self._containers.values else "mine", number]
        if isinstance(value, tuple(CONTENT)):
            self._containers.values[self._number(value)] = value
            return ["shared", self._numbers[id(value)]]
        if (place := place_of(value, anywhere=self._is_judge)) is not None:
            return ["place", *place]
        if isinstance(value, type):
            return self._describe(value)
        return self._encode_object(value)

    def _encode_object(self, value: Any) -> Any:
        base = plain_base(type(value))
        number = self._own(value)
        holds = hashed = None
        if issubclass(base, Exception):
            known = isinstance(value, OSError)
            arguments = OSError.__reduce__(value)[1] if known else value.args
            holds = [self._encode(argument) for argument in arguments]
        elif base is not object:
            holds = self._encode(base(*PARTS[base](value)))
        elif _has_its_own_hash(type(value)):
            with contextlib.suppress(Exception):
                hashed = self._encode(hash(value))
        return ["object", number, self._encode_class(type(value)), holds, hashed]

    def _encode_class(self, kind: type) -> Any:
        """Of an object that stays here. If it is not the same on both sides, it does, too."""
        if (number := self._numbers.get(id(kind))) is not None:
            return ["yours" if number in self._theirs else "mine", number]
        if (place := place_of(kind, anywhere=False)) is not None:
            return ["place", *place]
        return self._describe(kind)

    def _own(self, value: Any) -> int:
        number = self._number(value)
        self._mine[number] = value
        return number

    def _number(self, value: Any) -> int:
        self._last_number += 2
        self._numbers[id(value)] = self._last_number
        return self._last_number

    def _describe(self, kind: type) -> Any:
        """Put the class, after its bases, where the other side learns of it."""
        bases = [self._encode_class(base) for base in kind.__bases__]
        number = self._own(kind)
        self._classes.append([number, kind.__name__, bases, methods_of(kind)])
        return ["mine", number]

    def _know(self, number: int, mirror: Any) -> None:
        self._theirs[number] = mirror
        self._numbers[id(mirror)] = number

    def hash_of(self, mirror: Any) -> int:
        return self._hashes[self._numbers[id(mirror)]]

    def _decode(self, data: Any) -> Any:
        if data is None or type(data) in (bool, int, str):
            return data
        match data:
            case ["int", str(digits)]:
                return int(digits, 16)
            case ["float", str(digits)]:
                return float.fromhex(digits)
            case ["bytes", str(digits)]:
                return bytes.fromhex(digits)
            case ["items", list(items)]:
                return [self._decode(item) for item in items]
            case ["of", str(kind), list(parts)]:
                return PLAIN[kind](*(self._decode(part) for part in parts))
            case ["shared", int(number)]:
                return self._containers.values[number]
            case ["yours", int(number)]:
                return self._mine[number]
            case ["mine", int(number)]:
                return self._theirs[number]
            case ["place", str(module), str(name)]:
                return at_place(module, name, anywhere=not self._is_judge)
            case ["object", int(number), kind, holds, hashed]:
                mirror = self._mirror(number, self._decode(kind), holds)
                if hashed is not None:
                    self._hashes[number] = int(self._decode(hashed))
                return mirror
        raise ValueError("not a value")

    def _mirror(self, number: int, kind: Any, holds: Any) -> Any:
        if number in self._theirs:
            return self._theirs[number]
        base: Any = plain_base(kind)
        if issubclass(base, Exception):
            arguments = [self._decode(argument) for argument in holds]
            mirror = kind.__new__(kind, *arguments)
            # Some are not to be made of their arguments; what counts is of which kind they are.
            with contextlib.suppress(TypeError):
                base.__init__(mirror, *arguments)
        elif kind is object:
            mirror = ObjectMirror()
        elif not isinstance(kind, MirrorClass):
            raise ValueError("an object of a class that is not its owner's")
        else:
            mirror = base.__new__(kind, *([] if base is object else [self._decode(holds)]))
        self._know(number, mirror)
        return mirror


def _has_its_own_hash(kind: Any) -> bool:
    return kind.__hash__ is not None and kind.__hash__ is not object.__hash__
