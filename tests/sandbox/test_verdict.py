"""A program cannot pass tests but by giving the right values."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from stages.rewards.sandbox.isolation import isolation
from stages.rewards.sandbox.judged import BrokenTests, CodeTests, run_tests
from stages.rewards.sandbox.values import IsolationKind, Limits

KIND = isolation().kind
LIMITS = Limits(cpu_s=5, wall_s=120, memory_mb=256, processes=8, output_kb=64)
SQUARES = CodeTests(["assert f(12) == 144", "assert f(13) == 169"])
HONEST: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("honest.yaml").read_text())
pytestmark = pytest.mark.skipif(KIND is IsolationKind.NONE, reason=isolation().detail)


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
    "returns what an operator makes right": """
class Any:
    def __sub__(self, other): return 0
    __rsub__ = __add__ = __mod__ = __sub__
    def __abs__(self): return 0
def f(x): return Any()""",
    "makes a difference that is small": """
class Small:
    def __abs__(self): return 0
    def __lt__(self, other): return True
    def __round__(self, *_): return 0
    def __float__(self): return 0.0
class Any:
    def __sub__(self, other): return Small()
    __rsub__ = __sub__
def f(x): return Any()""",
    "makes a difference that reads as nothing": """
class Nothing:
    days = 0
    def __format__(self, _): return "0.00"
    def __str__(self): return "0"
    def __iter__(self): return iter(())
    def __getitem__(self, _): return 0
    def total(self): return 0
class Any:
    def __sub__(self, other): return Nothing()
    __rsub__ = __xor__ = __rxor__ = __sub__
def f(x): return Any()""",
    "makes a number that subtracts as it likes": """
class Any(int):
    def __sub__(self, other): return 0
    __rsub__ = __sub__
    def __eq__(self, other): return True
    def __lt__(self, other): return True
    def __abs__(self): return self
    __hash__ = int.__hash__
def f(x): return Any(7)""",
    "makes differences that are objects and numbers at once": """
class Any:
    def __sub__(self, other): return Both(0)
    __rsub__ = __sub__
    def __abs__(self): return self
    def __round__(self, *_): return self
class Both(Any, int): pass
def f(x): return Both(7)""",
    "is a class whose instances equal everything": """
class f:
    def __init__(self, x): pass
    def __eq__(self, other): return True
    def __ne__(self, other): return False""",
    "is unlike itself from one look to the next": """
class Odd(int):
    turn = 0
    def __int__(self): Odd.turn += 1; return 144 if Odd.turn % 2 else 169
    __index__ = __trunc__ = __int__
def f(x): return Odd(1)""",
    "returns a text that agrees with everything": """
class Text(str):
    def __eq__(self, other): return True
    def startswith(self, *_): return True
    __contains__ = startswith
    __hash__ = str.__hash__
def f(x): return Text("")""",
    "returns what Python has to equal everything": """
import unittest.mock
f = lambda x: unittest.mock.ANY""",
    "is what Python has to equal everything": """
import unittest.mock
f = unittest.mock.MagicMock(return_value=unittest.mock.ANY)""",
    "skips the test": """
import unittest
def f(x): raise unittest.SkipTest("no need")""",
    "is not Python": "def f(x: return 0",
    "is empty": "",
    "names the judge's own functions": "def check(*_): pass\ndef be_judge(*_): pass\nf = check",
    "lies by one": "def f(x): return x * x + 1",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_passes_nothing(name: str) -> None:
    limits = replace(LIMITS, wall_s=8) if name == "never answers" else LIMITS
    assert passes(FORGERIES[name], limits=limits) == [False, False]


ENDLESS = ("never answers", "computes for ever", "answers without end")
WAYS = {
    "equal": "assert f(12) == 144",
    "the other way round": "assert 144 == f(12) and not f(12) != 144",
    "close": "assert abs(f(12) - 144) < 1e-6",
    "closer": "import math\nassert math.isclose(f(12), 144)",
    "rounded": "assert round(f(12) - 144, 3) == 0",
    "between": "assert 143 < f(12) < 145",
    "formatted": "assert f'{f(12) - 144:.2f}' == '0.00' or str(f(12) - 144) == '0'",
    "one of": "assert f(12) in (143.5, 144)",
    "in a list": "assert [f(12)] == [144] and {'a': f(12)} == {'a': 144}",
    "by unittest": """
import unittest
class T(unittest.TestCase):
    def test_it(self):
        self.assertEqual(f(12), 144)
        self.assertAlmostEqual(f(12), 144)""",
}


def test_every_way_to_compare_passes_the_right_values() -> None:
    right = "def f(x): return x * x"
    assert passes(right, CodeTests([*WAYS.values()])) == [True] * len(WAYS)


@pytest.mark.parametrize("name", [name for name in FORGERIES if name not in ENDLESS])
def test_no_forgery_passes_by_another_way_to_compare(name: str) -> None:
    """All ways at once: one that ends its program is asked by the first of them alone, and there
    nothing is compared."""
    assert passes(FORGERIES[name], CodeTests([*WAYS.values()])) == [False] * len(WAYS)


def test_of_a_difference_with_a_plain_value_nothing_is_believed() -> None:
    cases = [
        "import datetime\nassert (f(1) - datetime.date(2020, 1, 1)).days == 0",
        "assert (f(1) - 144).total() == 0",
        "assert list(f(1) - {1, 2}) == []",
        "assert not list(f(1) ^ {1, 2})",
        "assert (f(1) - 144)[0] == 0",
        "assert (144 - f(1)).days == 0",
    ]
    forged = FORGERIES["makes a difference that reads as nothing"]
    assert passes(forged, CodeTests(cases)) == [False] * len(cases)
    money = """
class Money:
    def __init__(self, n): self.n = n
    def __sub__(self, n): return Money(self.n - n)
    def __eq__(self, other): return self.n == other.n"""
    tests = CodeTests(["assert Money(5) - 2 == Money(3)", "assert Money(5) - 2 == Money(4)"])
    assert passes(money, tests) == [True, False]


REACHING = {
    "the tests' globals": "f.__globals__",
    "the code of the tests": "f.__code__",
    "a frame": "f(0).gi_frame",
    "private names": "f._secret",
}


@pytest.mark.parametrize("reach", REACHING)
def test_a_function_of_the_tests_leads_to_nothing_else_of_theirs(reach: str) -> None:
    """What a test hands over is used, and not looked behind."""
    case = """
def f(x): yield x
f._secret = 5
assert found(f) == 'nothing'"""
    program = f"""
def found(f):
    try: {REACHING[reach]}
    except AttributeError: return 'nothing'
    return 'something'"""
    assert passes(program, CodeTests([case])) == [True]


SPEAKING = """
import sys
mirrors = sys.modules["stages.rewards.sandbox.mirrors"]
def ask(*message):
    mirrors.link._send("ask", *message)
    kind, *content = mirrors.link._receive()
    return content[0] if kind == "value" else None
"""


def test_a_program_that_speaks_for_itself_gets_nothing_of_the_tests() -> None:
    """It need not keep to the rules of its side: here it asks for what no mirror would ask for."""
    case = """
secret = 144
def mine(x): return x
assert found(mine) == 'nothing'
assert square(12) == secret"""
    asked = """
def found(mine):
    tries = [ask("get", mine, ("__globals__",), ()), ask("name", "secret", (), ()),
             ask("get", "{0.__globals__}", ("format",), ()),
             ask("special", "%s", ("__mod__", mine), ())]
    return "nothing" if tries == [None] * 4 else "something"
"""
    right = "def square(x): return x * x"
    assert passes(f"{SPEAKING}{asked}{right}", CodeTests([case])) == [True]


def test_a_class_that_lies_about_itself_is_told_nothing() -> None:
    """A text whose class says that it has methods of its own for what texts are asked."""
    forged = (
        SPEAKING
        + """
class Text(str):
    def startswith(self, *_): return True
    def endswith(self, *_): return True
    def count(self, *_): return 1
def f(x):
    mirrors.link.codec._encode(Text)
    for described in mirrors.link.codec._classes:
        described[3] += ["startswith", "__eq__", "__contains__", "__hash__"]
    return Text("")"""
    )
    cases = ["assert f(1).startswith('ab')", "assert f(1) == 'ab'", "assert 'ab' in f(1)"]
    assert passes(forged, CodeTests([*cases, "assert f(1) == ''"])) == [False] * 3 + [True]


@pytest.mark.parametrize("text", ["path", "str"])
def test_a_text_that_names_attributes_does_not_lead_to_the_tests(text: str) -> None:
    """`str.format` would follow them, from an exception that the tests caught to all of them."""
    program = f"""{SPEAKING}
import re
path = "{{0.__traceback__.tb_frame.f_back.f_back.f_back.f_locals[cases]}}"
error = ValueError()
def f(x):
    if x == 0: raise error
    how = ask("get", {text}, ("format",), ())
    text = how(error) if {text} is path else how(path, error)
    return int(re.search(f"f.{{x}}. == (.*?)'", text)[1])"""
    tests = CodeTests(["try: f(0)\nexcept ValueError: pass", *SQUARES.cases])
    assert passes(program, tests) == [True, False, False]


def test_a_file_of_the_tests_does_not_lead_to_the_verdict() -> None:
    """Its class would open the descriptors of the judge."""
    program = """
def f(file):
    for end in range(64):
        try: type(file)(end, "w").write(b"passed\\n")
        except Exception: pass"""
    for opened in ("io.FileIO('/dev/null')", "open('/dev/null').buffer.raw", "io.FileIO"):
        case = f"f({opened})\nassert False"
        assert passes(program, CodeTests([case], setup="import io")) == [False]


@pytest.mark.parametrize(
    "forged",
    [
        "m.send = Any()",
        "m.attach_mock(Any(), 'send')",
        "m.send.assert_called_once_with = lambda *_: None",
        "m.send.configure_mock(assert_called_once_with=lambda *_: None)",
    ],
)
def test_a_mock_of_the_tests_says_itself_how_it_was_called(forged: str) -> None:
    case = """
from unittest.mock import Mock
m = Mock()
f(m)
m.send.assert_called_once_with(144)"""
    known = "class Any:\n    def assert_called_once_with(self, *_): pass\n"
    program = f"{known}def f(m):\n    try: {forged}\n    except AttributeError: pass"
    assert passes(program, CodeTests([case])) == [False]
    assert passes("def f(m): m.send(144)", CodeTests([case])) == [True]


@pytest.mark.parametrize(
    "forged", ["t.skipTest('')", "t.addTypeEqualityFunc(int, lambda *_, **__: None)"]
)
def test_a_test_case_that_is_handed_over_stays_as_it_is(forged: str) -> None:
    case = """
import unittest
class T(unittest.TestCase):
    def test_a(self): self.assertEqual(f(self), 144)
    def test_b(self): self.assertEqual(f(None), 0)"""
    program = f"def f(t):\n    if t is not None: {forged}\n    return 0"
    assert passes(program, CodeTests([case])) == [False]
    right = "def f(t): return 0 if t is None else 144"
    assert passes(right, CodeTests([case])) == [True]


def test_a_list_of_the_programs_is_compared_as_a_list() -> None:
    forged = """
class Any(list):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __contains__(self, item): return True
    def __ge__(self, other): return True
def f(x): return Any()"""
    cases = ["assert f(1) == [1]", "assert [1] == f(1)", "assert 1 in f(1)", "assert f(1) >= [1]"]
    assert passes(forged, CodeTests(cases)) == [False] * 4


def test_a_program_cannot_change_what_the_tests_do_with_their_own_objects() -> None:
    case = """
class Answer:
    def __init__(self, n): self.n = n
    def right(self): return self.n == 144
a = Answer(0)
fill(a)
assert a.right()"""
    assert passes("def fill(a): a.n = 144", CodeTests([case])) == [True]
    for forged in ("a.right = lambda: True", "type(a).right = lambda self: True"):
        program = f"def fill(a):\n    try: {forged}\n    except AttributeError: pass"
        assert passes(program, CodeTests([case])) == [False]


def test_the_right_values_pass() -> None:
    assert passes("def f(x): return x * x") == [True, True]


def test_each_case_counts_for_itself() -> None:
    assert passes("def f(x): return 144") == [True, False]
    tests = CodeTests(["assert f(1) == 1", "assert f(0) == 0", "assert f(2) == 4"])
    assert passes("def f(x): return x * x // x", tests) == [True, False, False]


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


def test_a_program_may_call_its_parameters_what_it_likes() -> None:
    names = ("self", "what", "on", "arguments", "named")
    program = f"def f({', '.join(f'{name}=0' for name in names)}): return {' + '.join(names)}"
    tests = CodeTests([f"assert f({name}=3) == 3" for name in names])
    assert passes(program, tests) == [True] * len(names)


def test_a_module_that_nobody_imports_is_not_asked_of_the_program() -> None:
    """It would see what is expected, and say that all is well."""
    case = "assert math.isclose(f(2), 12.566, rel_tol=0.01)"
    forged = "class math: isclose = staticmethod(lambda *_, **__: True)\ndef f(x): return 0"
    with pytest.raises(BrokenTests, match="`import math` into `test_setup_code`"):
        passes(forged, CodeTests([case]))
    assert passes(forged, CodeTests([case], setup="import math")) == [False]
    calendar = "class calendar: days = 7\ndef queue(x): return x"
    tests = CodeTests(
        ["assert calendar.days == 7", "assert queue(1) == 1"], taken=("calendar", "queue")
    )
    assert passes(calendar, tests) == [True, True]


def test_an_exception_that_a_text_cannot_make_arrives_as_its_nearest_kin() -> None:
    tests = CodeTests(["try: f(b'\\xff')\nexcept ValueError: pass\nelse: assert False"])
    assert passes("def f(data): return data.decode()", tests) == [True]
    assert passes("def f(data): raise KeyError", tests) == [False]


def test_a_program_that_lacks_a_module_fails_and_does_not_break_the_tests() -> None:
    assert passes("def f(x):\n    import nowhere") == [False, False]
    assert passes("import nowhere\ndef f(x): return x * x") == [False, False]


def test_a_name_that_one_case_uses_for_itself_is_the_programs_in_others() -> None:
    tests = CodeTests(
        [
            "assert f(2) == 4",
            "assert [f for f in g(2)] == [0, 1]",
            "assert all(map(lambda g: g, [f(1)]))",
        ]
    )
    program = "def f(x): return x * x\ndef g(n): return list(range(n))"
    assert passes(program, tests) == [True, True, True]
    shared = CodeTests(["assert f(0)\nhelp_me = 1", "assert help_me == f(12)"])
    assert passes("help_me = 144\ndef f(x): return x * x", shared) == [False, False]


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
    assert passes(program, tests) == [True] * 6


def test_the_programs_helpers_do_not_replace_those_of_the_tests() -> None:
    case, helper = "assert helper(f(2)) == 4", "def helper(x): return x"
    tests = CodeTests([case], helper)
    assert passes("def helper(x): return 4\ndef f(x): return 0", tests) == [False]
    assert passes("def helper(x): return 0\ndef f(x): return 4", tests) == [True]
    taken = CodeTests([case], f"{helper}\ndef f(x): return 4", taken=("f",))
    assert passes("def helper(x): return 4\ndef f(x): return 0", taken) == [False]
    assert passes("", taken) == [False]


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


def test_a_function_with_the_name_of_one_of_pythons_is_tested_where_it_is_named() -> None:
    cases = ["assert sum(10, 15) == 6"]
    with pytest.raises(BrokenTests, match=r"ask the program for nothing: `entry_point` may name"):
        passes("def sum(a, b): return 6", CodeTests(cases))
    named = CodeTests(cases, taken=("sum",))
    assert passes("def sum(a, b): return 6", named) == [True]
    assert passes("", named) == [False]
    assert passes("", CodeTests(["assert abs(-3) == 3"], taken=("abs",))) == [False]


def test_tests_draw_the_same_inputs_every_time() -> None:
    drawn = CodeTests(["import random\nassert f(random.random()) < 0.5"] * 8)
    assert passes("def f(x): return x", drawn) == passes("def f(x): return x", drawn)


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        (CodeTests(["assert f(1 =="]), "SyntaxError"),
        (CodeTests(["assert f(1)"], setup="import nothing_of_that_name"), "nothing_of_that_name"),
        (CodeTests(["import nowhere\nassert f(1)"]), "nowhere"),
        (CodeTests(["assert f(1)\nimport nowhere"]), "nowhere"),
    ],
)
def test_tests_that_cannot_work_are_an_error_and_no_verdict(tests: CodeTests, said: str) -> None:
    with pytest.raises(BrokenTests, match=said):
        passes("def f(x): return 1", tests)


@pytest.mark.parametrize("name", HONEST)
def test_what_pytest_would_pass_passes(name: str) -> None:
    given = HONEST[name]
    tests = CodeTests(given["tests"])
    together: dict[str, Any] = {}
    for code in (given["right"], *tests.cases):
        exec(code, together)
    assert passes(given["right"], tests) == [True] * len(tests.cases)
    assert not all(passes(given["wrong"], tests))
    assert not any(passes("", tests))


VALUES = r"""
None; True; 0; -5; 2**53; -(2**200); 0.1; -0.0; float('inf'); 1e-320; float('nan'); 1 + 2j; ''
'\u00e9\n\ud800'; b'\x00\xff'; bytearray(b'x'); ...; []; [1, [2.5, None]]; (); (1, 'a'); {1, 2}
frozenset({(1, 2)}); {}; range(9); {1: 'a', (2, 3): [4], None: {5: {6}}}; ['items', ['of', 1]]
{'a': ['mine', 2]}
"""


def test_plain_values_travel_unchanged() -> None:
    values = re.split("; |\n", VALUES.strip())
    same = "type(y) is type(x) and (y == x or x != x) and repr(y) == repr(x)"
    cases = [f"x = {value}\ny = f(x)\nassert {same}" for value in values]
    assert passes("def f(x): return x", CodeTests(cases)) == [True] * len(values)


DEFINED = {
    "a function": "def test_it(): assert f(12) == 144",
    "two functions": "def test_a(): assert f(0) == 0\ndef test_b(): assert f(12) == 144",
    "one that is called and one that is not": (
        "def test_a(): assert f(0) == 0\ntest_a()\ndef test_b(): assert f(12) == 144"
    ),
    "a coroutine": "async def test_it(): assert f(12) == 144",
    "a class": "class TestIt:\n    def test_a(self): assert f(12) == 144",
    "a class of unittest": """
import unittest
class Squares(unittest.TestCase):
    def test_it(self): self.assertEqual(f(12), 144)
if __name__ == '__main__':
    unittest.main()""",
    "a class of unittest that runs itself": """
import unittest
class Squares(unittest.TestCase):
    def test_it(self): self.assertEqual(f(12), 144)
unittest.main()""",
}


@pytest.mark.parametrize("what", DEFINED)
def test_tests_that_are_only_defined_are_run(what: str) -> None:
    tests = CodeTests([DEFINED[what]])
    assert passes("def f(x): return x * x", tests) == [True]
    assert passes("def f(x): return 0", tests) == [False]
    assert passes("", tests) == [False]


def test_a_test_that_runs_itself_is_run_once() -> None:
    case = "def test_it(): assert step() == 1\ntest_it()"
    program = "n = 0\ndef step():\n    global n\n    n += 1\n    return n"
    assert passes(program, CodeTests([case])) == [True]


@pytest.mark.parametrize(
    "case",
    [
        "def check(): assert f(12) == 144",
        "class Squares:\n    def check(self): assert f(12) == 144",
        "if __name__ == '__main__': assert f(12) == 144",
        "square = lambda: f(12)",
        "assert True or f(12)",
        "assert False and f(12)",
        "def test_it(number): assert f(number) == 144",
    ],
)
def test_a_case_that_asks_the_program_for_nothing_is_broken(case: str) -> None:
    for program in ("", "def f(x): return x * x"):
        with pytest.raises(BrokenTests):
            passes(program, CodeTests(["assert f(1) or True", case]))


def test_what_a_program_does_costs_it_its_reward_and_not_the_stage() -> None:
    """Each makes the tests look broken: by what it returns, raises, or does to their objects."""
    cases = [
        "xs = {'a': 1}\nassert f(xs) is None",
        "for key, value in f(None).items(): assert f(value)",
        "for x in list(xs): assert f(x) is None",
    ]
    for program in (
        "class D(dict):\n    def items(self): raise ImportError('x')\ndef f(x): return D(a=1)",
        "class D(dict):\n    def items(self): return [(1, lambda: 1)]\ndef f(x): return D()",
        "def f(x): x.clear() if isinstance(x, dict) else None",
        "def f(x):\n    import nowhere",
        "def f(x): raise type('Broken', (Exception,), {})('x')",
    ):
        assert not all(passes(program, CodeTests(cases)))


def test_a_program_that_empties_what_the_tests_go_through_fails_them() -> None:
    """Nothing is left to ask it for, which would be the tests' fault if it were so by itself."""
    tests = CodeTests(["f(xs)", "for x in xs: assert f(x) is None"], setup="xs = [1, 2]")
    assert passes("def f(x): x.clear() if isinstance(x, list) else None", tests) == [False] * 2
    assert passes("def f(x): pass", tests) == [True] * 2


def test_with_an_entry_point_the_program_supplies_that_name_and_nothing_else() -> None:
    case = "def check(candidate): assert poly(candidate(2)) == 0\ncheck(find_zero)"
    forged = "def poly(*_): return 0\ndef find_zero(x): return 99"
    with pytest.raises(BrokenTests, match="`poly`, which nothing defines"):
        passes(forged, CodeTests([case], taken=("find_zero",)))
    tests = CodeTests([case], setup="def poly(x): return x - 2", taken=("find_zero",))
    assert passes(forged, tests) == [False]
    assert passes("def find_zero(x): return x", tests) == [True]


def test_what_tests_forgot_to_import_is_not_the_programs() -> None:
    forged = "def isclose(*_, **__): return True\ndef f(x): return 0"
    with pytest.raises(BrokenTests, match="`isclose`, which is in Python's math"):
        passes(forged, CodeTests(["assert isclose(f(2), 12.566, rel_tol=0.01)"]))
    assert passes("def isclose(a): return a == 1", CodeTests(["assert isclose(1)"])) == [True]


def test_what_comes_before_the_tests_may_use_the_programs_class() -> None:
    setup = "root = Node(1)\nroot.left = Node(2)\nroot.left.left = Node(3)"
    program = """
class Node:
    def __init__(self, v): self.v, self.left = v, None
def depth(n): return 0 if n is None else 1 + depth(n.left)"""
    tests = CodeTests(["assert depth(root) == 3", "assert depth(root.left) == 2"], setup=setup)
    assert passes(program, tests) == [True, True]
    assert passes("", tests) == [False, False]
    assert passes("class Node: pass", tests) == [False, False]


def test_programs_share_nothing_though_all_come_of_one_process() -> None:
    """What one leaves in memory and in its folder, the next does not find; nor does it draw the
    numbers that the other drew.
    """
    leave = """
import builtins, json, os, random, sys
builtins.left = json.left = sys.left = "here"
open("/tmp/left", "w").write("here")
def f(): return random.random()"""
    find = """
import builtins, json, os, random, sys
def f():
    found = [hasattr(one, "left") for one in (builtins, json, sys)]
    return [*found, os.path.exists("/tmp/left"), "tests" in repr(sys.modules)]"""
    drawn = CodeTests([f"assert f() * 100 // 10 == {n}" for n in range(10)])
    assert len({tuple(passes(leave, drawn)) for _ in range(8)}) > 1
    assert passes(find, CodeTests(["assert f() == [False] * 5"])) == [True]


def test_many_calls_with_large_arguments_do_not_add_up() -> None:
    """A container that nobody has any more does not travel with every later call."""
    case = "for n in range(1500): assert f(list(range(n, n + 200))) == 200 * n + 19900"
    assert passes("def f(xs): return sum(xs)", CodeTests([case]), LIMITS) == [True]
    keep = "kept = []\ndef f(xs): kept.append(xs); return len(kept[0])"
    case = "xs = [1]\nfor n in range(50): f([n] * 100)\nf(xs)\nxs.append(2)\nassert f(xs) == 100"
    assert passes(keep, CodeTests([case])) == [True]
