"""Values and objects of one process, used in another as if they were there.

Two processes hold a `Link` each, at the ends of two pipes, and take turns. What travels is JSON, a
line a message: values as codec.py writes them.
"""

from __future__ import annotations

import copy
import io
import json
import sys
import threading

from stages.rewards.sandbox import mirrors
from stages.rewards.sandbox.codec import Codec
from stages.rewards.sandbox.guard import AccessRefused, refuse_insides, refuse_kind
from stages.rewards.sandbox.mirrors import COMPARISONS, OPERATORS, SPECIAL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, BinaryIO

_LONGEST_LINE = 1 << 24


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
        self.codec = Codec(is_judge=self._is_judge)
        self._turn = threading.RLock()
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
            if not self.codec.has_handed_out(on):
                raise AccessRefused("of what it was not given")
            refuse_kind(on)
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

    def _send(self, *message: Any) -> None:
        try:
            packed = self.codec.pack(message)
            printed = sys.stdout.take() if isinstance(sys.stdout, Printed) else ""
            line = json.dumps([*packed, printed])
            view = memoryview(line.encode() + b"\n")
            while view:
                view = view[self._outgoing.write(view) :]
        except (OSError, RecursionError) as error:
            raise self._failure(error) from None

    def _receive(self) -> list[Any]:
        self.receiving = True
        try:
            line = self._incoming.readline(_LONGEST_LINE)
            *packed, printed = json.loads(line)
            message = self.codec.unpack(*packed)
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
