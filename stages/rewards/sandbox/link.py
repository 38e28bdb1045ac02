"""Values and objects of one process, used in another as if they were there.

Two processes hold a `Link` each, at the ends of two pipes, and take turns. What travels is JSON, a
line a message, and a value in it is one of these:

- plain: numbers, texts, tuples, fractions and the like are rebuilt from what they hold;
- a container: lists, dicts, sets and their kin are numbered. Both sides have one, and each message
  brings what has changed in them, so an argument that is changed in place changes for the caller;
- an object: it stays where it is. The other side has a mirror of it, whose class mirrors its class:
  same name, same bases, and special methods that ask the owner. A subclass of a plain type mirrors
  as one, too, and holds the plain value, with which it is compared.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import io
import json
import sys
import threading
import types

from stages.rewards.sandbox import mirrors
from stages.rewards.sandbox.containers import Containers
from stages.rewards.sandbox.guard import AccessRefused, refuse_insides, refuse_kind
from stages.rewards.sandbox.mirrors import (
    ANSWERS,
    COMPARISONS,
    OPERATORS,
    SPECIAL,
    VALUE_OF,
    Awaited,
    Mirror,
    MirrorClass,
    ObjectMirror,
    attribute,
    compare,
    forward,
    hash_of_mirror,
    operate,
)
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
    from collections.abc import Mapping
    from typing import Any, BinaryIO

_LONGEST_LINE = 1 << 24
_EXACT_IN_JSON = 1 << 53
_WITH_METHODS = (dict, list, collections.deque)
"""Plain types whose methods a subclass may replace. Those of the others would be told what a test
expects: whether a text starts with it, whether a set is within it.
"""


class PeerFailed(BaseException):
    """The other side gave no answer, or one that is none. Not for tests to catch."""


class Printed(io.StringIO):
    """Takes what is printed on this side until the next message brings it to the other."""

    def take(self) -> str:
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return text


class Link:
    """One end of the pipes. There is one in a process."""

    def __init__(
        self, incoming: BinaryIO, outgoing: BinaryIO, names: Mapping[str, Any] | None = None
    ) -> None:
        """`names` are what the other side may ask for by name. The end that has none is the judge,
        and hands out objects of its own, but nothing that leads from them to its insides.
        """
        mirrors.link = self
        self._incoming, self._outgoing = incoming, outgoing
        self._names = names
        self._is_judge = names is None
        self._last_number = 0 if self._is_judge else 1
        self._turn = threading.RLock()
        self._mine: dict[int, Any] = {}
        self._theirs: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        """By `id`, of all that the other tables hold."""
        self._containers = Containers(self._numbers, self._encode, self._decode)
        self._hashes: dict[int, int] = {}
        """Of mirrors whose class defines one."""
        self._classes: list[Any] = []
        """Descriptions that the next message takes along."""
        self._loop: Any = None
        self.derived: set[int] = set()
        """By `id`, mirrors of what came of an operator with a plain value."""
        self.differences: set[int] = set()
        """Those that came of a subtraction."""
        self.receiving = False
        self.asked = 0
        """How many questions this side has asked."""
        self.failed = False
        """Whether the other side has failed, at whatever point."""

    def ask(self, what: str, on: Any, /, *arguments: Any, **named: Any) -> Any:
        """Have the other side do something with an object of its own."""
        if id(on) in self.differences and not (OPERATORS | COMPARISONS).intersection(arguments[:1]):
            raise TypeError("a difference of an object and a plain value is asked for more")
        with self._turn:
            self.asked += 1
            self._send("ask", what, on, arguments, tuple(named.items()))
            while True:
                kind, *content = self._receive()
                if kind == "ask":
                    self._answer(*content)
                elif kind == "value":
                    return content[0]
                else:
                    raise self._to_raise(content[0], what, arguments)

    def _to_raise(self, error: Any, what: str, arguments: tuple[Any, ...]) -> BaseException:
        if not isinstance(error, Exception):
            return self._failure(ValueError("what was raised is no exception"))
        if isinstance(error, StopIteration):
            if what == "special" and arguments[0] == "__next__":
                return StopIteration(*error.args)
            # To whatever goes through a test's values it would say that there are no more of them.
            return RuntimeError("StopIteration was raised")
        if isinstance(error, StopAsyncIteration):
            ends = what == "await" or arguments[:1] == ("__anext__",)
            return error if ends else RuntimeError("StopAsyncIteration was raised")
        return error

    def serve(self) -> None:
        """Answer until nobody asks any more."""
        while True:
            kind, *content = self._receive()
            if kind == "ask":
                self._answer(*content)

    def _answer(self, what: str, on: Any, arguments: tuple[Any, ...], named: Any) -> None:
        try:
            answer = ("value", self._done(what, on, arguments, dict(named)))
        except Exception as error:
            answer = ("raised", error.with_traceback(None))
        self._send(*answer)

    def _done(self, what: str, on: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if what == "name" and self._names is not None:
            return self._names[on]
        if self._is_judge:
            self._refuse_unless_handed_out(on)
            if what in ("get", "set", "delete"):
                refuse_insides(what, on, arguments[0])
        match what, arguments:
            case "call", _:
                return on(*arguments, **named)
            case "get", [str(name)]:
                return getattr(on, name)
            case "set", [str(name), value]:
                return setattr(on, name, value)
            case "delete", [str(name)]:
                return delattr(on, name)
            case "special", ["__getitem__", key]:
                # A class has items by its own methods or by those of its class.
                return on[key]
            case "special", [str(name), *rest] if name in SPECIAL:
                return getattr(type(on), name)(on, *rest, **named)
            case "copy", []:
                return copy.copy(on)
            case "deepcopy", []:
                return copy.deepcopy(on)
            case "await", []:
                return self._awaited(on)
        raise AccessRefused(f"{what} {arguments}")

    def _refuse_unless_handed_out(self, on: Any) -> None:
        number = self._numbers.get(id(on), 0)
        kin = self._containers.values.get(number) is on and type(on) not in CONTENT
        if self._mine.get(number) is not on and not kin:
            raise AccessRefused("of what it was not given")
        refuse_kind(on)

    def _awaited(self, on: Any) -> Any:
        import asyncio

        async def whole() -> Any:
            return await on

        running = asyncio._get_running_loop()
        if self._loop is None or self._loop.is_running():
            self._loop = asyncio.new_event_loop()
        # Whatever waits for this runs in a loop of this process, or in one that asked for it.
        asyncio._set_running_loop(None)
        try:
            return self._loop.run_until_complete(whole())
        finally:
            asyncio._set_running_loop(running)

    # A message: classes that are new, containers that changed or are gone, and what it says.

    def _send(self, *message: Any) -> None:
        try:
            body = [self._encode(part) for part in message]
            changed = self._containers.changes()
            gone = self._containers.forget_unused()
            printed = sys.stdout.take() if isinstance(sys.stdout, Printed) else ""
            line = json.dumps([self._classes, changed, body, gone, printed])
            self._classes = []
            view = memoryview(line.encode() + b"\n")
            while view:
                view = view[self._outgoing.write(view) :]
        except (OSError, RecursionError) as error:
            raise self._failure(error) from None

    def _receive(self) -> list[Any]:
        self.receiving = True
        try:
            line = self._incoming.readline(_LONGEST_LINE)
            classes, changed, body, gone, printed = json.loads(line)
            for number, *description in classes:
                self._mirror_class(number, *description)
            self._containers.apply(changed)
            message = [self._decode(part) for part in body]
            for number in gone:
                self._containers.drop(number)
        except Exception as error:
            raise self._failure(error) from None
        finally:
            self.receiving = False
        if printed:
            sys.stdout.write(str(printed))
        return message

    def _failure(self, error: Exception) -> PeerFailed:
        self.failed = True
        return PeerFailed(f"no answer: {error!r}")

    # Values.

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
        methods = [name for name, method in vars(kind).items() if name in SPECIAL and method]
        methods += [name for name in vars(kind) if name[:1] != "_"]
        if hasattr(kind, "__await__"):
            methods.append("__await__")
        self._classes.append([number, kind.__name__, bases, methods])
        return ["mine", number]

    def _mirror_class(self, number: int, name: str, bases: list[Any], methods: list[str]) -> None:
        above = [base for base in map(self._decode, bases) if base is not object] or [ObjectMirror]
        kin = not all(issubclass(base, ObjectMirror) for base in above)
        space: dict[str, Any] = {"__module__": "candidate", "__doc__": attribute("__doc__")}
        for method in methods:
            if "__await__" in methods and method in vars(Awaited):
                continue
            if method in ANSWERS:
                space[method] = forward(method)
            elif method in OPERATORS or (method in VALUE_OF and not kin):
                space[method] = operate(method)
            elif method in COMPARISONS and not kin:
                space[method] = compare(method)
            elif method == "__hash__" and not kin:
                space[method] = hash_of_mirror
            elif method[:1] != "_" and any(
                issubclass(base, _WITH_METHODS) and hasattr(base, method) for base in above
            ):
                space[method] = attribute(method)
        if not any(issubclass(base, Mirror) for base in above):
            above.insert(0, Mirror)
        if "__await__" in methods:
            above.insert(0, Awaited)
        self._know(number, MirrorClass(str(name), tuple(above), space))

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
