"""The list of deliberate breaks: an entry of tests/breaks.yaml, and whether it fits the code."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from ruamel.yaml import YAML

LIST = "tests/breaks.yaml"
TIMEOUT_S = 600.0
"""Of the tests of one break, where it says nothing else."""
_TEST = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)


class BreakError(Exception):
    """The list is wrong; the message names the break and the file."""


@dataclass(frozen=True)
class Break:
    """A mistake that somebody could make."""

    name: str
    file: str
    find: str
    """Occurs exactly once in the file."""
    replace: str
    why: str
    """What goes wrong for a user."""
    caught_by: tuple[str, ...]
    """Test files, or tests as pytest names them."""
    may_hang: bool = False
    """Whether tests that never end are how it shows."""
    timeout_s: float = TIMEOUT_S
    """Of its tests; less where they are quick and it may hang."""


def load(path: Path) -> list[Break]:
    """The breaks of a list; BreakError where an entry is not one."""
    entries = YAML(typ="safe", pure=False).load(path.read_text(encoding="utf-8")) or []
    breaks = []
    for number, entry in enumerate(entries, 1):
        try:
            breaks.append(Break(**{**entry, "caught_by": tuple(entry["caught_by"])}))
        except (TypeError, KeyError) as error:
            raise BreakError(f"{path}: entry {number} ({entry}): {error}") from None
    return breaks


def select(breaks: Sequence[Break], patterns: Sequence[str]) -> list[Break]:
    """Those whose name or file has one of the patterns in it; all where there are none."""
    return [
        each
        for each in breaks
        if not patterns
        or any(fnmatch(text, f"*{p}*") for p in patterns for text in (each.name, each.file))
    ]


def problems(root: Path, breaks: Sequence[Break]) -> list[str]:
    """What is wrong with the list, without running a test."""
    found = []
    names = Counter(each.name for each in breaks)
    found += [f"{name}: two breaks have this name" for name, count in names.items() if count > 1]
    for each in breaks:
        try:
            broken(each, root)
        except BreakError as error:
            found.append(str(error))
        if not each.caught_by:
            found.append(f"{each.name}: it names no test")
        found += [
            f"{each.name}: there is no test {test}"
            for test in each.caught_by
            if not _exists(root, test)
        ]
    return found


def broken(each: Break, root: Path) -> str:
    """The text of the file with the break in it."""
    path = root / each.file
    if not path.is_file():
        raise BreakError(f"{each.name}: there is no file {each.file}")
    text = path.read_text(encoding="utf-8")
    if (count := text.count(each.find)) != 1:
        raise BreakError(
            f"{each.name}: its text is {count} times in {each.file} and has to be there once: "
            f"{each.find!r}"
        )
    if each.replace == each.find:
        raise BreakError(f"{each.name}: it changes nothing in {each.file}")
    return text.replace(each.find, each.replace)


def _exists(root: Path, test: str) -> bool:
    """Whether a file, or a function of it, is there; a folder counts as a file."""
    name, _, function = test.partition("::")
    path = root / name
    if not function:
        return path.exists()
    return path.is_file() and function.partition("[")[0] in _functions(path)


@cache
def _functions(path: Path) -> set[str]:
    """By a pattern: to parse all files of tests takes longer than a quick test may."""
    return set(_TEST.findall(path.read_text(encoding="utf-8")))


def packages(root: Path, *parents: str) -> list[str]:
    """Every folder with Python files in it, below some folders."""
    files = (path for parent in parents for path in (root / parent).rglob("*.py"))
    return sorted({path.parent.relative_to(root).as_posix() for path in files})
