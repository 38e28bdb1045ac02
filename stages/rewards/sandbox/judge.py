"""The side of the tests. What they find goes out through a descriptor that no program has.

In the tests' namespace the program's names are mirrors of its objects (see link.py). A case
passes if it runs through, and so do the test functions and unittest classes that it defines and
does not call. A case that never looks at the program is broken, whatever comes of it: the same
would come of any program.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import random
import symtable
import sys
import types
from collections import namedtuple
from importlib.util import find_spec

from stages.rewards.sandbox.link import Link
from stages.rewards.sandbox.streams import take_streams

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

READY, PASSED, FAILED, BROKEN = "ready", "passed", "failed", "broken "
"""What the judge says, a line each: that it is there, then one for every case."""
LONGEST_RESULT = 1000
_OFTEN_FORGOTTEN = {
    "collections": "Counter OrderedDict defaultdict deque namedtuple",
    "copy": "deepcopy",
    "datetime": "date datetime timedelta",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "functools": "partial reduce",
    "itertools": "chain combinations islice permutations product",
    "math": "inf isclose isfinite isinf isnan nan pi",
}
"""What tests use to check with, and would get from a program that happens to define it."""


class Broken(Exception):
    """The tests are wrong, whatever the program."""


class Namespace(dict[str, "Any"]):
    """The tests' names, and among them the program's, asked for when a test first uses them."""

    def __init__(self, link: Link, theirs: set[str]) -> None:
        super().__init__(__name__="judge", __builtins__=builtins)
        self._link = link
        self._theirs = theirs
        self._fetched: dict[str, Any] = {}
        self.derived: set[str] = set()
        """Names of what earlier cases made of the program."""
        self.looked = False
        """Whether a test used anything of the program."""
        self.missed = False
        """Whether the program lacked it."""

    def __getitem__(self, name: str) -> Any:
        if name in self.derived:
            self.looked = True
        if name not in self._theirs:
            return super().__getitem__(name)
        self.looked = True
        if name not in self._fetched:
            try:
                self._fetched[name] = self._link.ask("name", name)
            except Exception:
                self.missed = True
                # A KeyError would have Python look for one of its own.
                raise NameError(f"the program has no `{name}`") from None
        return self._fetched[name]


def be_judge(setup: str, cases: list[str], taken: list[str]) -> None:
    """Run the cases, and say of each whether it passed.

    `setup` is trusted code that runs first, here. The names in `taken` are the program's, even if
    `setup` defines them. Where none are given, those are that the tests use and do not define.
    """
    answers, questions, out = take_streams()

    def say(line: str) -> None:
        out.write(" ".join(line.splitlines())[:LONGEST_RESULT].encode() + b"\n")

    say(READY)
    sys.argv = ["judge"]
    # Tests that draw their inputs draw the same ones every time.
    random.seed(0)
    try:
        theirs = _names_of_the_program(setup, cases, taken)
    except Broken as error:
        say(f"{BROKEN}{error}")
        return
    link = Link(answers, questions)
    space = Namespace(link, theirs)
    try:
        exec(compile(setup, "setup", "exec", dont_inherit=True), space)
        set_up = True
    except BaseException as error:
        set_up = False
        if not space.looked:
            say(f"{BROKEN}what comes before them does not run: {error!r}")
            return
    for number, case in enumerate(cases):
        result = _result_of(case, f"case {number}", space, link) if set_up else FAILED
        say(result)
        if result.startswith(BROKEN):
            return


def _result_of(case: str, name: str, space: Namespace, link: Link) -> str:
    space.looked = space.missed = False
    asked = link.asked
    failure: BaseException | None = None
    try:
        _run(case, name, space)
    except Broken as error:
        return f"{BROKEN}{error}"
    except BaseException as error:
        failure = error
    looked = space.looked or link.asked > asked
    if looked:
        space.derived |= _names(case, name).defined
    if link.failed or space.missed:
        return FAILED
    if not looked:
        why = "" if failure is None else f", and fails: {failure!r}"
        return f"{BROKEN}{name} asks the program for nothing{why}"
    return PASSED if failure is None else FAILED


def _run(case: str, name: str, space: Namespace) -> None:
    """The case, then what it defines as a test and has not called itself."""
    before = dict(space)
    called: set[types.CodeType] = set()

    def note(frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename == name:
            called.add(frame.f_code)

    exit: SystemExit | None = None
    sys.setprofile(note if "test" in case else None)
    try:
        exec(compile(case, name, "exec", dont_inherit=True), space)
    except SystemExit as error:
        exit = error
    finally:
        sys.setprofile(None)
    new = [(word, value) for word, value in dict.items(space) if before.get(word) is not value]
    tests = [test for word, value in new for test in _tests_in(word, value, called)]
    # `unittest.main()` finds nothing here, and exits.
    if exit is not None and not tests:
        raise exit
    for test in tests:
        test()


def _tests_in(name: str, value: Any, called: set[types.CodeType]) -> Iterator[Any]:
    """What pytest would find under this name."""
    if isinstance(value, types.FunctionType) and name.startswith("test"):
        if value.__code__ not in called:
            yield _without_arguments(value)
    elif isinstance(value, type) and _codes_of_tests(value).isdisjoint(called):
        unittest = sys.modules.get("unittest")
        if unittest is not None and issubclass(value, unittest.TestCase):
            if _codes_of_tests(value):
                yield lambda: _run_test_case(unittest, value)
        elif name.startswith("Test"):
            for method in dir(value):
                if method.startswith("test"):
                    yield lambda method=method: _run_method(value, method)


def _codes_of_tests(kind: type) -> set[types.CodeType]:
    tests = (getattr(kind, name, None) for name in dir(kind) if name.startswith("test"))
    return {test.__code__ for test in tests if isinstance(test, types.FunctionType)}


def _without_arguments(test: Any) -> Any:
    for parameter in inspect.signature(test).parameters.values():
        if parameter.default is parameter.empty and parameter.kind not in (2, 4):
            raise Broken(f"{test.__name__} takes `{parameter.name}`, and nothing here gives it")
    if inspect.iscoroutinefunction(test):
        import asyncio

        return lambda: asyncio.run(test())
    return test


def _run_method(kind: type, name: str) -> None:
    instance = kind()
    getattr(instance, "setup_method", lambda: None)()
    _without_arguments(getattr(instance, name))()


def _run_test_case(unittest: Any, kind: type) -> None:
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(kind).run(result)
    if not result.wasSuccessful() or result.testsRun == len(result.skipped):
        raise AssertionError(f"{kind.__name__}: {result}")


Names = namedtuple("Names", ("read", "defined"))
"""Of a source, those that are global: what it reads, and what it gives a value."""


def _names(source: str, called: str) -> Names:
    names = Names(set(), set())
    try:
        own_scopes = ast.unparse(_Scoped().visit(ast.parse(source)))
        table = symtable.symtable(own_scopes, called, "exec")
    except (SyntaxError, ValueError) as error:
        raise Broken(repr(error)) from None
    for inner in _tables(table):
        for symbol in inner.get_symbols():
            here = inner is table or symbol.is_declared_global()
            if here and (symbol.is_assigned() or symbol.is_imported()):
                names.defined.add(symbol.get_name())
            if symbol.is_referenced() and (inner is table or symbol.is_global()):
                names.read.add(symbol.get_name())
    return names


class _Scoped(ast.NodeTransformer):
    """Comprehensions as generators, whose names are their own in the tables of every Python.

    From 3.12 on, those of `[f for f in g]` are also among those of what is around it.
    """

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp) -> ast.AST:
        self.generic_visit(node)
        return ast.GeneratorExp(node.elt, node.generators)

    visit_SetComp = visit_ListComp  # noqa: N815

    def visit_DictComp(self, node: ast.DictComp) -> ast.AST:
        self.generic_visit(node)
        both = ast.Tuple([node.key, node.value], ast.Load())
        return ast.GeneratorExp(both, node.generators)


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


def _names_of_the_program(setup: str, cases: list[str], taken: list[str]) -> set[str]:
    by_part = [_names(setup, "setup")]
    by_part += [_names(case, f"case {number}") for number, case in enumerate(cases)]
    _refuse_missing_modules([setup, *cases])
    free = set().union(*(names.read for names in by_part))
    free -= {*dir(builtins), "__file__"}.union(*(names.defined for names in by_part))
    for name in sorted((free - {*taken}) & _looked_into([setup, *cases])):
        raise Broken(
            f"they use Python's `{name}`, and nothing imports it: write `import {name}` into "
            "`test_setup_code`, or name it in `entry_point` if it is the program's"
        )
    if taken:
        _refuse(free - {*taken}, "nothing defines")
        return {*taken}
    if not free:
        raise Broken("they ask the program for nothing: `entry_point` may name what they test")
    if len(free) > 1:
        for module, names in _OFTEN_FORGOTTEN.items():
            _refuse(free & {*names.split()}, f"is in Python's {module} and nothing imports")
    return free


def _refuse(names: set[str], why: str) -> None:
    for name in sorted(names):
        raise Broken(
            f"they use `{name}`, which {why}: put it into `test_setup_code`, or name it in "
            "`entry_point` if it is the program's"
        )


def _looked_into(sources: list[str]) -> set[str]:
    """The names of Python's own modules of which the tests take something."""
    return {
        node.value.id
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    } & sys.stdlib_module_names


def _refuse_missing_modules(sources: list[str]) -> None:
    """What no sandbox has, no program can pass; but where a test tries, it may do without."""
    nodes: list[ast.AST] = [ast.parse(source) for source in sources]
    while nodes:
        match node := nodes.pop():
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), level=0):
                modules = [module]
            case _:
                modules = []
                nodes += [] if isinstance(node, ast.Try) else ast.iter_child_nodes(node)
        for module in modules:
            if find_spec(module.partition(".")[0]) is None:
                raise Broken(
                    f"ModuleNotFoundError: they import `{module}`, and the sandbox has the "
                    "standard library alone"
                )
