"""A program cannot pass tests but by giving the right values."""

import json
from dataclasses import replace

import pytest

from stages.rewards.sandbox.conversation import decode, encode
from stages.rewards.sandbox.isolation import isolation
from stages.rewards.sandbox.judged import BrokenTests, CodeTests, run_tests
from stages.rewards.sandbox.status import Kind
from stages.rewards.sandbox.values import Limits

KIND = isolation().kind
LIMITS = Limits(cpu_s=5, wall_s=120, memory_mb=256, processes=8, output_kb=64)
SQUARES = CodeTests(["assert f(12) == 144", "assert f(13) == 169"])
needs_isolation = pytest.mark.skipif(KIND is Kind.NONE, reason=isolation().detail)


def passes(program: str, tests: CodeTests = SQUARES, limits: Limits = LIMITS) -> list[bool]:
    return run_tests(program, tests, limits, kind=KIND)


FORGERIES = {
    "says that it passed": "print('passed\\npassed'); f = print",
    "says so on every descriptor": """
import os
for end in range(64):
    try: os.write(end, b"ready\\npassed\\npassed\\n")
    except OSError: pass
def f(x): return None""",
    "exits with success": "import os; os._exit(0)",
    "exits with success when asked": "import os\ndef f(x): os._exit(0)",
    "raises SystemExit": "def f(x): raise SystemExit(0)",
    "raises KeyboardInterrupt": "def f(x): raise KeyboardInterrupt",
    "raises what the judge raises": """
class Unsendable(Exception): pass
class CandidateFailed(Exception): pass
def f(x): raise (Unsendable if x == 12 else CandidateFailed)("no")""",
    "says passed at exit": """
import atexit, os
atexit.register(lambda: os.write(1, b"passed\\n") + os.write(2, b"passed\\n"))
def f(x): return 0""",
    "replaces the standard streams": """
import io, sys
sys.stdout = sys.stderr = sys.__stdout__ = io.StringIO("passed")
def f(x): return 0""",
    "patches the built-ins": """
import builtins
builtins.isinstance = builtins.all = lambda *_: True
builtins.AssertionError = ValueError
builtins.__build_class__ = None
def f(x): return 0""",
    "patches json": """
import json
json.dumps = lambda *_: '{"passed": true}'
def f(x): return 0""",
    "patches the module that serves it": """
import sys
main = sys.modules["__main__"]
main.encode = lambda *_: True
main._send = lambda end, _: end.write(b'{"value": true}\\n')
def f(x): return 0""",
    "returns what equals everything": """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
def f(x): return Any()""",
    "returns a number that equals everything": """
class Any(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = int.__hash__
def f(x): return Any(0)""",
    "returns a class whose type compares": """
class Meta(type):
    def __eq__(cls, other): return True
    __hash__ = type.__hash__
class Any(metaclass=Meta): pass
def f(x): return Any""",
    "returns a bound method of the expected value": "def f(x): return (x * x + 1).__eq__",
    "looks for the expected value in memory": """
import gc, sys
def f(x):
    frame = sys._getframe()
    while frame:
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
            if value in (144, 169): return value
        frame = frame.f_back
    text = " ".join(map(repr, gc.get_objects()))
    return 144 if " ".join(["assert", "f(12)"]) in text else 0""",
    "looks for the tests in files": """
import os
def f(x):
    for folder, _, names in os.walk("/tmp"):
        for name in names:
            text = open(os.path.join(folder, name), errors="replace").read()
            if "assert f(" in text: return x * x
    return 0""",
    "removes everything it can": """
import os
for name in os.listdir("/tmp"): os.unlink("/tmp/" + name)
def f(x): return 0""",
    "answers before it is asked": """
import os
for end in range(3, 64):
    try: os.write(end, b'{"value": true}\\n' * 10)
    except OSError: pass
def f(x): return True""",
    "answers with what is no value": """
import os
for end in range(3, 64):
    try: os.write(end, b'{"value": {"is": "x"}}\\n{"value": ["exec", "1"]}\\nnull\\n[]\\n7\\n')
    except OSError: pass
def f(x): return 0""",
    "answers with the handle of something else": """
import os
for end in range(3, 64):
    try: os.write(end, b'{"value": ["handle", 999999]}\\n' * 5)
    except OSError: pass""",
    "answers with nested brackets": """
import os
for end in range(3, 64):
    try: os.write(end, b'{"value": ' + b'["list", [' * 5000 + b']]' * 5000 + b'}\\n')
    except OSError: pass
def f(x): return 0""",
    "answers without end": """
import os
def f(x):
    while True:
        for end in range(3, 64):
            try: os.write(end, b"[" * 65536)
            except OSError: pass""",
    "raises an exception with a crafted name": """
import os
for end in range(3, 64):
    try:
        for name in (b"__import__", b"SystemExit", b"exec", b"object"):
            os.write(end, b'{"raised": "' + name + b'", "message": "os"}\\n')
    except OSError: pass""",
    "leaves a child that answers later": """
import os, time
def f(x):
    if os.fork() == 0:
        time.sleep(0.3)
        for end in range(64):
            try: os.write(end, b"passed\\npassed\\n")
            except OSError: pass
        os._exit(0)
    os._exit(0)""",
    "never answers": "import time\ndef f(x): time.sleep(600)",
    "computes for ever": "def f(x):\n    while True: pass",
    "is not Python": "def f(x: return 0",
    "is empty": "",
    "names the judge's own functions": "def check(*_): pass\ndef be_judge(*_): pass\nf = check",
    "lies by one": "def f(x): return x * x + 1",
}


@needs_isolation
@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_passes_nothing(name: str) -> None:
    limits = replace(LIMITS, wall_s=8) if name == "never answers" else LIMITS
    assert passes(FORGERIES[name], limits=limits) == [False, False]


@needs_isolation
def test_the_right_values_pass() -> None:
    assert passes("def f(x): return x * x") == [True, True]


@needs_isolation
def test_each_case_counts_for_itself() -> None:
    assert passes("def f(x): return 144") == [True, False]
    tests = CodeTests(["assert f(1) == 1", "assert f(0) == 0", "assert f(2) == 4"])
    assert passes("def f(x): return x * x // x", tests) == [True, False, False]


@needs_isolation
def test_exceptions_of_the_program_reach_the_tests_as_pythons_own() -> None:
    tests = CodeTests(
        [
            "try: f(0)\nexcept ZeroDivisionError as error: assert 'zero' in str(error)",
            "try: f('x')\nexcept LookupError: pass",
            "try: f(1)\nexcept ValueError: assert False",
        ]
    )
    program = """
class Odd(KeyError): pass
def f(x):
    if x == "x": raise Odd("x")
    return 1 / x"""
    assert passes(program, tests) == [True, True, True]


@needs_isolation
@pytest.mark.parametrize(
    "case",
    [
        "for got, want in zip(map(f, [12, 13]), [144, 169]): assert got == want",
        "assert all(map(lambda x: f(x) == x * x, [12, 13]))",
        "assert all(f(x) == x * x for x in [12, 13])",
        "assert not list(filter(lambda x: f(x) != x * x, [12, 13]))",
    ],
)
def test_nothing_passes_because_the_program_says_that_there_are_no_more_values(case: str) -> None:
    for kind in ("StopIteration", "StopAsyncIteration", "type('Odd', (StopIteration,), {})"):
        assert passes(f"def f(x): raise {kind}", CodeTests([case])) == [False]
    assert passes("def f(x): return x * x", CodeTests([case])) == [True]


@needs_isolation
def test_a_program_may_call_its_parameters_what_it_likes() -> None:
    names = ("self", "what", "on", "arguments", "named")
    program = f"def f({', '.join(f'{name}=0' for name in names)}): return {' + '.join(names)}"
    tests = CodeTests([f"assert f({name}=3) == 3" for name in names])
    assert passes(program, tests) == [True] * len(names)


@needs_isolation
def test_a_module_that_nobody_imports_is_not_asked_of_the_program() -> None:
    """It would see what is expected, and say that all is well."""
    case = "assert math.isclose(f(2), 12.566, rel_tol=0.01)"
    forged = "class math: isclose = staticmethod(lambda *_, **__: True)\ndef f(x): return 0"
    with pytest.raises(BrokenTests, match="`import math` into `test_setup_code`"):
        passes(forged, CodeTests([case]))
    assert passes(forged, CodeTests([case], setup="import math")) == [False]
    calendar = "class calendar: days = 7\ndef queue(x): return x"
    tests = CodeTests(["assert calendar.days == 7", "assert queue(1) == 1"], taken=("calendar",))
    assert passes(calendar, tests) == [True, True]


@needs_isolation
def test_an_exception_that_a_text_cannot_make_arrives_as_its_nearest_kin() -> None:
    tests = CodeTests(["try: f(b'\\xff')\nexcept ValueError: pass\nelse: assert False"])
    assert passes("def f(data): return data.decode()", tests) == [True]
    assert passes("def f(data): raise KeyError", tests) == [False]


@needs_isolation
def test_a_program_that_lacks_a_module_fails_and_does_not_break_the_tests() -> None:
    assert passes("def f(x):\n    import nowhere") == [False, False]
    assert passes("import nowhere\ndef f(x): return x * x") == [False, False]


@needs_isolation
def test_a_name_that_one_case_uses_for_itself_is_the_programs_in_others() -> None:
    tests = CodeTests(
        [
            "assert f(2) == 4",
            "assert [f for f in g(2)] == [0, 1]",
            "assert all(map(lambda g: g, [1]))",
        ]
    )
    program = "def f(x): return x * x\ndef g(n): return list(range(n))"
    assert passes(program, tests) == [True, True, True]
    shared = CodeTests(["assert f(0)\nhelp_me = 1", "assert help_me == f(12)"])
    assert passes("help_me = 144\ndef f(x): return x * x", shared) == [False, False]


@needs_isolation
def test_objects_stay_with_the_program_and_can_be_used() -> None:
    program = """
class Stack:
    def __init__(self, *items): self.items = list(items)
    def push(self, item): self.items.append(item); return self
    def __len__(self): return len(self.items)
    def __getitem__(self, at): return self.items[at]
def numbers(n): yield from range(n)
def same(a, b): return a is b"""
    tests = CodeTests(
        [
            "s = Stack(1, 2)\nassert s.push(3).items == [1, 2, 3]",
            "assert len(s) == 3 and s[0] == 1 and list(s) == [1, 2, 3] and 2 in s",
            "assert list(numbers(3)) == [0, 1, 2]",
            "assert same(s, s)",
            "assert s == s",
            "assert s != 3",
        ]
    )
    assert passes(program, tests) == [True, True, True, True, False, False]


@needs_isolation
def test_the_programs_helpers_do_not_replace_those_of_the_tests() -> None:
    case, helper = "assert helper(f(2)) == 4", "def helper(x): return x"
    tests = CodeTests([case], helper)
    assert passes("def helper(x): return 4\ndef f(x): return 0", tests) == [False]
    assert passes("def helper(x): return 0\ndef f(x): return 4", tests) == [True]
    taken = CodeTests([case], f"{helper}\ndef f(x): return 4", taken=("f",))
    assert passes("def helper(x): return 4\ndef f(x): return 0", taken) == [False]
    assert passes("", taken) == [False]


@needs_isolation
def test_what_is_looked_for_in_an_object_is_not_told_to_the_program() -> None:
    class_of = "class Any:\n    def __init__(self, *items): self.items = items\n"
    yes = "    def __contains__(self, item): self.items = [item]; return True\n"
    listed = "    def __iter__(self): return iter(self.items)\n"
    tests = CodeTests(["assert 144 in f(12)", "found = f(13)\nassert 169 in found and 9 in found"])
    assert passes(f"{class_of}{yes}def f(x): return Any()", tests) == [False, False]
    assert passes(f"{class_of}{yes}{listed}def f(x): return Any()", tests) == [False, False]
    assert passes(f"{class_of}{listed}def f(x): return Any(9, x * x)", tests) == [True, True]
    assert passes("def f(x): return (n for n in (9, x * x))", tests) == [True, False]
    own = CodeTests(["tree = f(1)\nassert tree.root in tree"])
    assert passes(f"{class_of}{yes}    root = object()\ndef f(x): return Any()", own) == [True]


@needs_isolation
def test_a_function_with_the_name_of_one_of_pythons_is_tested_where_it_is_named() -> None:
    cases = ["assert sum(10, 15) == 6"]
    with pytest.raises(BrokenTests, match=r"ask the program for nothing: `entry_point` may name"):
        passes("def sum(a, b): return 6", CodeTests(cases))
    named = CodeTests(cases, taken=("sum",))
    assert passes("def sum(a, b): return 6", named) == [True]
    assert passes("", named) == [False]
    assert passes("", CodeTests(["assert abs(-3) == 3"], taken=("abs",))) == [False]


@needs_isolation
def test_tests_draw_the_same_inputs_every_time() -> None:
    drawn = CodeTests(["import random\nassert f(random.random()) < 0.5"] * 8)
    assert passes("def f(x): return x", drawn) == passes("def f(x): return x", drawn)


@needs_isolation
@pytest.mark.parametrize(
    ("tests", "said"),
    [
        (CodeTests(["assert f(1 =="]), "SyntaxError"),
        (CodeTests(["assert f(1)"], setup="import nothing_of_that_name"), "nothing_of_that_name"),
        (CodeTests(["assert f(lambda: 1)"]), "passes a function"),
    ],
)
def test_tests_that_cannot_work_are_an_error_and_no_verdict(tests: CodeTests, said: str) -> None:
    with pytest.raises(BrokenTests, match=said):
        passes("def f(x): return 1", tests)


VALUES = [
    *(None, True, 0, -5, 2**53, -(2**200), 10**5000, 0.1, -0.0, float("inf"), 1e-320, 1 + 2j),
    *("", "é\n\ud800", b"\x00\xff", bytearray(b"x"), [], [1, [2.5, None]], (), (1, "a"), {1, 2}),
    *(frozenset({(1, 2)}), {}, {1: "a", (2, 3): [4], None: {5: {6}}}),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_plain_values_travel_unchanged(value: object) -> None:
    line = json.dumps(encode(value, pytest.fail))
    back = decode(json.loads(line), pytest.fail)
    assert (type(back), repr(back) if value != 10**5000 else back) == (
        type(value),
        repr(value) if value != 10**5000 else value,
    )


@pytest.mark.parametrize(
    "line",
    ["1.5", "{}", '["exec", "1"]', '["int", 5]', '["list", {}]', '["list"]', '["dict", [[1]]]'],
)
def test_what_is_no_value_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        decode(json.loads(line), pytest.fail)
