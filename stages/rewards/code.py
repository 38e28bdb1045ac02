"""code: the response is a Python program, which runs in the sandbox against its row's tests.

The program is the response's last block of Python, or the whole response where it has none. Its
row says how to test it, by one of these:

- `tests`, a list of {input, output}: it reads the one and must print the other. What it prints is
  compared here, line by line without trailing space; it must exit with code 0.
- `tests` or `test_list`, a list of Python statements such as `assert add(1, 2) == 3`; what these
  need beside the program is in `test_setup_code`, or a list in `test_imports` (MBPP has both).
- `test` and `entry_point`, as HumanEval has them: `test` defines check(candidate). The prompt, if
  it is Python or its last block is, comes before the program, which may go on where it ends.

With an `entry_point`, one name or several, the program supplies these and nothing else; without,
every name that the tests use and do not define.

A wrong program, one that hangs and one that attacks get no reward. A sandbox or a test that does
not work is an error: nothing is known about the program then.
"""

import ast
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from stages.context import Context, StageError
from stages.contracts.reward_rules import Counted
from stages.contracts.rewards import UNISOLATED, Code
from stages.rewards.given import Row, Unusable, list_of, name_of
from stages.rewards.sandbox.isolation import kind_to_use
from stages.rewards.sandbox.judged import BrokenTests, CodeTests, run_tests
from stages.rewards.sandbox.run import run_program
from stages.rewards.sandbox.values import IsolationKind, Limits, SandboxBroken, SandboxUnavailable
from stages.rewards.side_by_side import BatchScorer

_PYTHON_BLOCK = re.compile(r"```[ \t]*(?:python3?|py)[ \t]*\n(.*?)(?:\n[ \t]*```|\Z)", re.S | re.I)
_ANY_BLOCK = re.compile(r"```[^\n`]*\n(.*?)(?:\n[ \t]*```|\Z)", re.S)
_PARSING = threading.Lock()


@dataclass(frozen=True)
class Exchange:
    """What a program reads, and what it must print."""

    given: str
    expected: str


@dataclass(frozen=True)
class Exam:
    """How to test the program of a row."""

    tests: list[Exchange] | CodeTests
    before: str = ""
    """What stands before the response's program."""


def program_of(response: str) -> str:
    """The last block of Python; the last block of any kind; or all of the response."""
    for pattern in (_PYTHON_BLOCK, _ANY_BLOCK):
        if blocks := pattern.findall(response):
            return f"{blocks[-1]}\n"
    return response


def exam_of(row: Row) -> Exam:
    """What the row's columns say; Unusable if they say nothing that makes sense."""
    extra = row["extra"]
    # A table has nulls where other rows have a column.
    if extra.get("entry_point") is not None and extra.get("test") is not None:
        names, test = _entry_points(extra), str(extra["test"])
        if not _defines_check(test):
            raise Unusable("its `test` does not define check(candidate), which tests the program")
        before = _python_of(row["prompt"], names[0])
        setup = "\n".join([before, _setup(extra)])
        case = f"{test}\n\ncheck({names[0]})\n"
        return Exam(CodeTests([case], setup=setup, taken=names), before)
    tests = _list(extra, "tests" if extra.get("tests") is not None else "test_list")
    if all(isinstance(test, str) for test in tests):
        for number, test in enumerate(tests):
            if not test.strip():
                raise Unusable(f"number {number} of its tests is empty: any program would pass it")
        taken = _entry_points(extra)
        return Exam(CodeTests([str(test) for test in tests], setup=_setup(extra), taken=taken))
    return Exam([_exchange(number, test) for number, test in enumerate(tests)])


def _entry_points(extra: Row) -> tuple[str, ...]:
    """The names that are the program's: `entry_point`, one or a list."""
    named = extra.get("entry_point")
    if named is None:
        return ()
    names = [named] if _is_name(named) else list_of(extra, "entry_point")
    if not names or not all(_is_name(name) for name in names):
        raise Unusable(f"its `entry_point` is neither a name nor a list of names: {named!r}")
    return tuple(names)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isidentifier()


def _setup(extra: Row) -> str:
    imports = [] if extra.get("test_imports") is None else _texts(extra, "test_imports")
    return "\n".join([*imports, str(extra.get("test_setup_code") or "")])


def _python_of(prompt: str, name: str) -> str:
    """The Python in a prompt: all of it, or its last block if that defines the function."""
    blocks = _PYTHON_BLOCK.findall(prompt) or _ANY_BLOCK.findall(prompt)
    for text in (prompt, *blocks[-1:]):
        if (tree := _parsed(text)) is not None and (
            text is prompt or any(getattr(node, "name", None) == name for node in tree.body)
        ):
            return f"{text}\n"
    return ""


def _texts(extra: Row, name: str) -> list[str]:
    values = list_of(extra, name)
    if values is None or not all(isinstance(value, str) for value in values):
        raise Unusable(f"its `{name}` is no list of texts")
    return values


def _list(extra: Row, name: str) -> list[Any]:
    tests = list_of(extra, name)
    if not tests:
        raise Unusable(
            "its row has no tests: give it a column `tests`, a list of {input, output} or of "
            "assert statements, or the columns `test` and `entry_point`"
        )
    return tests


def _exchange(number: int, test: Any) -> Exchange:
    match test:
        case {"input": str(given), "output": str(expected)}:
            return Exchange(given, expected)
    raise Unusable(f"number {number} of its `tests` is neither {{input, output}} of texts nor text")


def _defines_check(test: str) -> bool:
    tree = _parsed(test)
    if tree is None:
        # Whoever runs it will say so.
        return True
    nodes = ast.walk(tree)
    return any(getattr(node, "name", getattr(node, "id", None)) == "check" for node in nodes)


def _parsed(text: str) -> ast.Module | None:
    # Rows are looked at side by side, and Python 3.11 loses count if two threads parse at once.
    with _PARSING:
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError):
            return None


def passed(
    program: str, tests: list[Exchange] | CodeTests, limits: Limits, kind: IsolationKind
) -> list[bool]:
    """Which tests the program passes."""
    if isinstance(tests, CodeTests):
        return run_tests(program, tests, limits, kind=kind)
    return [_answers_right(program, test, limits, kind) for test in tests]


def _answers_right(program: str, test: Exchange, limits: Limits, kind: IsolationKind) -> bool:
    done = run_program(program, test.given, limits=limits, kind=kind)
    return done.succeeded and _lines(done.stdout) == _lines(test.expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


class CodeScorer(BatchScorer):
    """Programs of many rows, some at a time."""

    def __init__(self, ctx: Context, name: str, params: Code) -> None:
        super().__init__(ctx, params.concurrency)
        self._name, self._params = name, params
        self._limits = Limits(**{item.name: getattr(params, item.name) for item in fields(Limits)})
        try:
            self._kind = kind_to_use(allow_unisolated=params.allow_unisolated is not None)
        except SandboxUnavailable as error:
            raise StageError(
                f"rewards.{name} (code): {error}\nTo let programs run as yourself, with your files "
                "and the network within their reach, set "
                f'rewards.{name}.allow_unisolated: "{UNISOLATED}"'
            ) from None
        if self._kind is IsolationKind.NONE:
            print(f"reward {name!r} (code) runs programs WITHOUT ISOLATION", file=sys.stderr)

    def _of_batch(self, batch: Sequence[Row]) -> list[float]:
        return [self._of_row(row) for row in batch]

    def _of_row(self, row: Row) -> float:
        try:
            exam = exam_of(row)
            if self._given_up.is_set() or (
                self._params.must_end and row["finish_reason"] != "stop"
            ):
                return 0.0
            program = exam.before + program_of(row["response"])
            results = passed(program, exam.tests, self._limits, self._kind)
        except Unusable as error:
            raise StageError(f"{self._what(row)}: {error}") from None
        except BrokenTests as error:
            raise StageError(f"{self._what(row)}: its tests do not work: {error}") from None
        except SandboxBroken as error:
            raise StageError(
                f"{self._what(row)}: the sandbox failed, which says nothing about the program: "
                f"{error}. See `lockstep doctor`, then run again"
            ) from None
        if self._params.counted is Counted.SHARE:
            return sum(results) / len(results)
        return float(all(results))

    def _what(self, row: Row) -> str:
        return f"reward {self._name!r} (code) cannot score {name_of(row)}"
