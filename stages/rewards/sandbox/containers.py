"""Lists, dicts and sets that both processes have, kept alike.

Each has a number. A message brings what has changed in them since the last one, so both sides know
the same of a container whenever one of them runs.
"""

from __future__ import annotations

import json
import sys
from operator import is_

from stages.rewards.sandbox.plain import CONTENT, PLAIN, fill, plain_base

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_ATOMS = {bool, bytes, float, int, str, type(None)}


class Containers:
    """Those of one end of a link, which encodes and decodes what they hold."""

    def __init__(
        self, numbers: dict[int, int], encode: Callable[[Any], Any], decode: Callable[[Any], Any]
    ) -> None:
        self._numbers, self._encode, self._decode = numbers, encode, decode
        self.values: dict[int, Any] = {}
        self._known: dict[int, str] = {}
        """The content of each as both sides know it."""
        self._atoms: dict[int, list[Any]] = {}
        """The same of those that hold nothing which could change: quicker to compare."""

    def changes(self) -> list[Any]:
        """What the other side does not know of."""
        changes: list[Any] = []
        seen: set[int] = set()
        # To look into one may show others.
        while unseen := self.values.keys() - seen:
            for number in sorted(unseen):
                value = self.values[number]
                kind = plain_base(type(value))
                parts = CONTENT[kind](value)
                if _same(parts, self._atoms.get(number)):
                    continue
                content = [self._encode(part) for part in parts]
                if self._known.get(number) != (text := json.dumps(content)):
                    own = None if type(value) is kind else self._encode(type(value))
                    changes.append([number, kind.__name__, own, content])
                self._note(number, parts, text)
            seen |= unseen
        return changes

    def apply(self, changes: list[Any]) -> None:
        for number, kind, own, _ in changes:
            if number not in self.values:
                plain: Any = PLAIN[kind]
                value = plain.__new__(plain if own is None else self._decode(own))
                self.values[number] = value
                self._numbers[id(value)] = number
        for number, kind, _, content in changes:
            fill(self.values[number], PLAIN[kind], [self._decode(part) for part in content])
        for number, kind, _, _ in changes:
            parts = CONTENT[PLAIN[kind]](self.values[number])
            self._note(number, parts, json.dumps([self._encode(part) for part in parts]))

    def _note(self, number: int, parts: list[Any], text: str) -> None:
        self._known[number] = text
        self._atoms.pop(number, None)
        if _ATOMS.issuperset(map(type, parts)):
            self._atoms[number] = parts

    def forget_unused(self) -> list[int]:
        """Containers that nobody here has any more: the other side may keep them to itself."""
        unused = [
            number
            for number in list(self.values)
            # The table has it, and so has the function that counts.
            if sys.getrefcount(self.values[number]) <= 2
        ]
        for number in unused:
            self.drop(number)
        return unused

    def drop(self, number: int) -> None:
        value = self.values.pop(number, None)
        self._known.pop(number, None)
        self._atoms.pop(number, None)
        self._numbers.pop(id(value), None)


def _same(parts: list[Any], before: list[Any] | None) -> bool:
    return before is not None and len(parts) == len(before) and all(map(is_, parts, before))
