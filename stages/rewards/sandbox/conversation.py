"""The two ends of a judged run, each in a sandbox of its own. This file is what runs in both.

The *candidate* holds the program that nobody trusts. It is asked for its functions by name, called
with values, and answers with values. The *judge* holds the tests. In its namespace the program's
functions are stand-ins that ask the candidate; the comparison happens here, on plain values of
Python's own types, so an object that calls itself equal to everything never gets this far. What the
judge finds goes out through a descriptor that the candidate has not.

Values travel as JSON, one line each way. What is not a plain value stays with the candidate, and
the judge gets a handle that can be called and looked into, but equals nothing.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any, BinaryIO

    Other = Callable[[Any], Any]

TASK = "task.json"
READY, PASSED, FAILED, BROKEN = "ready", "passed", "failed", "broken "
"""What the judge says, a line each: that it is there, then one for every case."""
LONGEST_VERDICT = 1000
_LONGEST_LINE = 1 << 24
_EXACT_IN_JSON = 1 << 53


class CandidateFailed(Exception):
    """The program gave no answer, or one that is not an answer."""


class Unsendable(Exception):
    """A test passes something that cannot travel."""


def encode(value: Any, other: Other) -> Any:
    """As JSON; `other` takes what is no plain value. Kin of plain types travel as these."""
    if value is None or isinstance(value, (bool, str)):
        return value if value is None or isinstance(value, bool) else str.__str__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        return number if abs(number) < _EXACT_IN_JSON else ["int", format(number, "x")]
    if isinstance(value, float):
        return ["float", float.hex(value)]
    if isinstance(value, complex):
        return ["complex", float.hex(value.real), float.hex(value.imag)]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes" if isinstance(value, bytes) else "bytearray", value.hex()]
    if isinstance(value, dict):
        return ["dict", [[encode(k, other), encode(v, other)] for k, v in dict.items(value)]]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            items: Any = kind.__iter__
            return [kind.__name__, [encode(item, other) for item in items(value)]]
    return other(value)


def decode(data: Any, other: Other) -> Any:
    """The value; ValueError for anything that `encode` does not write."""
    if data is None or type(data) in (bool, int, str):
        return data
    match data:
        case ["int", str(digits)]:
            return int(digits, 16)
        case ["float", str(digits)]:
            return float.fromhex(digits)
        case ["complex", str(real), str(imaginary)]:
            return complex(float.fromhex(real), float.fromhex(imaginary))
        case ["bytes", str(digits)]:
            return bytes.fromhex(digits)
        case ["bytearray", str(digits)]:
            return bytearray.fromhex(digits)
        case ["dict", list(pairs)]:
            return {decode(key, other): decode(value, other) for key, value in pairs}
        case ["list" | "tuple" | "set" | "frozenset" as kind, list(items)]:
            plain: Any = getattr(builtins, kind)
            return plain(decode(item, other) for item in items)
        case ["handle", int(number)]:
            return other(number)
    raise ValueError("not a value")


def _take_streams() -> tuple[BinaryIO, BinaryIO, BinaryIO]:
    """The standard streams, out of the way of code that reads or prints."""
    mine = [os.dup(stream) for stream in range(3)]
    nothing = os.open("/dev/null", os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    return (
        os.fdopen(mine[0], "rb"),
        os.fdopen(mine[1], "wb", buffering=0),
        os.fdopen(mine[2], "wb", buffering=0),
    )


def _send(end: BinaryIO, message: Any) -> None:
    view = memoryview(json.dumps(message).encode() + b"\n")
    while view:
        view = view[end.write(view) :]


# What the judge may do with a handle, besides calling it.
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "getattr": getattr,
    "getitem": lambda value, key: value[key],
    "contains": lambda value, item: item in value,
    "list": list,
    "len": len,
    "str": str,
    "bool": bool,
}


def be_candidate(program: str) -> None:
    """Answer the judge's questions with the untrusted program. Nothing here is to be trusted."""
    questions, answers, _ = _take_streams()
    module = types.ModuleType("candidate")
    sys.modules["candidate"] = module
    exec(compile(program, "candidate.py", "exec"), module.__dict__)
    held: list[Any] = []

    def hold(value: Any) -> Any:
        held.append(value)
        return ["handle", len(held) - 1]

    for line in questions:
        what, on, arguments, named = json.loads(line)
        try:
            given = [decode(item, held.__getitem__) for item in arguments]
            keywords = {name: decode(item, held.__getitem__) for name, item in named.items()}
            if what == "name":
                result = module.__dict__[on]
            elif what == "call":
                result = held[on](*given, **keywords)
            else:
                result = _OPERATIONS[what](held[on], *given)
            answer = {"value": encode(result, hold)}
        except Exception as error:
            known = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
            answer = {"raised": known.__name__, "message": str(error)[:1000]}
        _send(answers, answer)


class Link:
    """The judge's way to the candidate."""

    def __init__(self, answers: BinaryIO, questions: BinaryIO) -> None:
        self._answers = answers
        self._questions = questions

    def ask(self, what: str, on: Any, arguments: Iterable[Any] = (), /, **named: Any) -> Any:
        message = [
            what,
            on,
            [encode(item, _handle_of) for item in arguments],
            {name: encode(item, _handle_of) for name, item in named.items()},
        ]
        try:
            _send(self._questions, message)
            line = self._answers.readline(_LONGEST_LINE)
            answer = json.loads(line)
            if "value" in answer:
                return decode(answer["value"], lambda number: Handle(self, number))
            raised, text = str(answer["raised"]), str(answer["message"])
        except Exception as error:
            raise CandidateFailed(f"no answer: {error!r}") from None
        kind = getattr(builtins, raised, None)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise CandidateFailed(f"{raised}: {text}")
        raise _of_candidate(kind, text)


def _of_candidate(kind: type[Exception], text: str) -> Exception:
    """What the program raised, or the nearest of its kin that can be made of a text alone."""
    if issubclass(kind, (StopIteration, StopAsyncIteration)):
        # To whatever goes through the test's values this would say that there are no more of them.
        kind, text = RuntimeError, f"the program raised {kind.__name__}"
    for kin in kind.__mro__:
        try:
            failure: Exception = kin(text)
        except TypeError:
            continue
        # The judge tells by this that it was not a test that raised it.
        failure.of_candidate = True  # type: ignore[attr-defined]
        return failure
    return CandidateFailed(text)


class Handle:
    """Something that stayed with the candidate."""

    def __init__(self, link: Link, number: int) -> None:
        self.__dict__.update(_link=link, _number=number)

    def __call__(self, /, *arguments: Any, **named: Any) -> Any:
        return self._link.ask("call", self._number, arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.ask("getattr", self._number, (name,))

    def __getitem__(self, key: Any) -> Any:
        return self._link.ask("getitem", self._number, (key,))

    def __contains__(self, item: Any) -> bool:
        if isinstance(item, Handle):
            return bool(self._link.ask("contains", self._number, (item,)))
        # What is looked for is what the test expects: the program neither sees it nor says yes.
        return item in list(self)

    def __iter__(self) -> Any:
        return iter(self._link.ask("list", self._number))

    def __len__(self) -> int:
        return int(self._link.ask("len", self._number))

    def __bool__(self) -> bool:
        return bool(self._link.ask("bool", self._number))

    def __str__(self) -> str:
        return str(self._link.ask("str", self._number))

    def __eq__(self, other: object) -> bool:
        raise CandidateFailed("the program returned an object, which cannot be compared")

    __ne__ = __eq__
    __hash__ = object.__hash__


def _handle_of(value: Any) -> Any:
    if isinstance(value, Handle):
        return ["handle", value._number]
    raise Unsendable(f"a test passes a {type(value).__name__}, which cannot be sent to the program")


def be_judge(setup: str, cases: list[str], taken: list[str]) -> None:
    """Run the cases, and say of each whether it passed.

    `setup` is trusted code that runs first, here. The names in `taken`, and those that the cases
    use and nobody here defines, are the candidate's.
    """
    import random

    answers, questions, out = _take_streams()

    def verdict(line: str) -> None:
        out.write(f"{line}\n".encode())

    verdict(READY)
    link = Link(answers, questions)
    # Tests that draw their inputs draw the same ones every time.
    random.seed(0)
    space: dict[str, Any] = {"__name__": "judge"}
    try:
        programs = [compile(case, f"case {number}", "exec") for number, case in enumerate(cases)]
        exec(compile(setup, "setup", "exec"), space)
        names = {*taken, *(_free_names(cases) - {*space, *dir(builtins)})}
        modules = _modules_looked_into(cases) & names - {*taken}
    except BaseException as error:
        verdict(f"{BROKEN}{error!r}"[:LONGEST_VERDICT])
        return
    if not names:
        verdict(f"{BROKEN}they ask the program for nothing: `entry_point` may name what they test")
        return
    if modules:
        module = min(modules)
        verdict(
            f"{BROKEN}they use Python's `{module}`, and nothing imports it: write `import {module}`"
            f" into `test_setup_code`, or name it in `entry_point` if it is the program's"
        )
        return
    # Where the program lacks a name, no test is to find one of Python's own under it.
    pythons = vars(builtins).items()
    space["__builtins__"] = {name: value for name, value in pythons if name not in names}
    for name in sorted(names):
        space.pop(name, None)
        try:
            space[name] = link.ask("name", name)
        except Exception:
            # Not there: the case that needs it fails with a NameError.
            continue
    for program in programs:
        try:
            exec(program, space)
            verdict(PASSED)
        except Unsendable as error:
            verdict(f"{BROKEN}{error}"[:LONGEST_VERDICT])
            return
        except ImportError as error:
            if not hasattr(error, "of_candidate"):
                verdict(f"{BROKEN}{error!r}"[:LONGEST_VERDICT])
                return
            verdict(FAILED)
        except BaseException:
            verdict(FAILED)


def _modules_looked_into(cases: list[str]) -> set[str]:
    """The names of Python's own modules of which a case takes something."""
    import ast

    nodes = (node for case in cases for node in ast.walk(ast.parse(case)))
    found = {
        node.value.id
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    return found & sys.stdlib_module_names


def _free_names(cases: list[str]) -> set[str]:
    """Names that a case reads and does not set, nor any other one for it.

    What a comprehension or a function calls its own is so in its own case only.
    """
    import ast

    def bound_by(nodes: Iterable[ast.AST]) -> set[str]:
        bound: set[str] = set()
        for node in nodes:
            match node:
                case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
                    bound.add(name)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    bound.add(name)
                case ast.ClassDef(name=name) | ast.ExceptHandler(name=str(name)):
                    bound.add(name)
                case ast.alias(name=name, asname=other):
                    bound.add(other or name.partition(".")[0])
        return bound

    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    comprehensions = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

    def in_the_open(tree: ast.AST) -> Iterable[ast.AST]:
        yield tree
        if not isinstance(tree, (*functions, *comprehensions)):
            for child in ast.iter_child_nodes(tree):
                yield from in_the_open(child)

    free: set[str] = set()
    shared: set[str] = set()
    for case in cases:
        tree = ast.parse(case)
        nodes = list(ast.walk(tree))
        read = {node.id for node in nodes if isinstance(node, ast.Name)}
        free |= read - bound_by(nodes)
        shared |= bound_by(in_the_open(tree))
    return free - shared


if __name__ == "__main__":
    with open(TASK, encoding="utf-8") as file:
        task = json.load(file)
    os.unlink(TASK)
    if "program" in task:
        be_candidate(task["program"])
    else:
        be_judge(**task)
    # Threads and exit handlers of the program have no say any more.
    os._exit(0)
