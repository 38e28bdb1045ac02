"""The code reward: what it takes for a program, how rows are tested, and what is an error."""

import gc
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from stages.context import Context, StageError
from stages.contracts.rewards import UNISOLATED, AnySource
from stages.rewards.code import exam_of, passed, program_of
from stages.rewards.given import given
from stages.rewards.sandbox.isolation import isolation
from stages.rewards.sandbox.values import IsolationKind, Limits
from tests.rewards.conftest import row, scored
from tests.waiting import TIMEOUT_S

HUMANEVAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "humaneval.jsonl"
pytestmark = pytest.mark.skipif(isolation().kind is IsolationKind.NONE, reason=isolation().detail)


def a_row(response: str, prompt: str = "Write it.", finish: str = "stop", **extra: Any) -> dict:
    return {**row(response, None, 1, **extra), "prompt": prompt, "finish_reason": finish}


def score(tmp_path: Path, *rows: dict, **params: Any) -> list[float]:
    ctx = Context(stage="score@iter_001", key="iter_001", seed=1, folder=tmp_path)
    return scored(ctx, list(rows), tmp_path, kind="code", **params)


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("x = 1", "x = 1"),
        ("Sure:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```py\nx = 1\n```\nor better\n```Python\nx = 2\n```\n```text\nout\n```", "x = 2\n"),
        ("```\nx = 3\n```", "x = 3\n"),
        ("```python\nx = 4\n", "x = 4\n\n"),
        ("```python\n    return 1\n```", "    return 1\n"),
    ],
)
def test_the_program_is_the_last_block_of_python(response: str, program: str) -> None:
    assert program_of(response) == program


DOUBLE = [{"input": "2\n", "output": "4\n"}, {"input": "5", "output": "10"}]


def test_programs_that_read_and_print(tmp_path: Path) -> None:
    rows = [
        a_row("```python\nprint(2 * int(input()))\n```", tests=DOUBLE),
        a_row("print(f'{2 * int(input())}   ')\nprint()", tests=DOUBLE),
        a_row("print(4)", tests=DOUBLE),
        a_row("print(2 * int(input())); raise SystemExit(3)", tests=DOUBLE),
        a_row("print('4\\n10')", tests=DOUBLE),
        a_row("while True: pass", tests=DOUBLE),
        a_row("not python at all", tests=DOUBLE),
        a_row("", tests=DOUBLE),
    ]
    assert score(tmp_path, *rows, cpu_s=5, wall_s=TIMEOUT_S) == [1, 1, 0, 0, 0, 0, 0, 0]
    assert score(tmp_path, *rows[:3], counted="share") == [1, 1, 0.5]


def test_programs_that_are_called(tmp_path: Path) -> None:
    asserts = ["assert add(1, 2) == 3", "assert add(sqrt(4), 1) == 3"]
    columns = {"tests": asserts, "test_setup_code": "from math import sqrt"}
    halves = ["assert add(1, 2) == 3", "assert add(3, 0) == 3"]
    rows = [
        a_row("def add(a, b): return a + b", **columns),
        a_row("def add(a, b): return 3", **columns),
        a_row("def add(a, b): return a", test_list=halves),
        a_row("def add(a, b): return a + b", tests=json.dumps(["assert add(1, 2) == 3"])),
        a_row("def abs(a): return 3", test_list=["assert abs(-2) == 3"], entry_point="abs"),
    ]
    assert score(tmp_path, *rows, counted="share") == [1, 1, 0.5, 1, 1]


def test_columns_that_a_row_has_not_are_null_and_do_not_hide_its_tests(tmp_path: Path) -> None:
    """A program that defines `check` must not become its own test."""
    columns = {"test": None, "entry_point": None, "tests": None, "test_list": ["assert f(2) == 4"]}
    rows = [
        a_row("def check(*_): pass\ndef f(x): return 0", **columns),
        a_row("def f(x): return x + x", **columns),
    ]
    assert score(tmp_path, *rows) == [0, 1]


def test_what_a_program_prints_does_not_limit_how_many_tests_there_are(tmp_path: Path) -> None:
    tests = [f"assert f({n}) == {n}" for n in range(300)]
    rows = [a_row("def f(x): return x", tests=tests)]
    assert score(tmp_path, *rows, output_kb=1, counted="share") == [1]


def test_texts_that_are_no_unicode_are_given_as_they_are(tmp_path: Path) -> None:
    tests = [{"input": "\ud800", "output": "3"}]
    program = "import sys; print(len(sys.stdin.buffer.read()))"
    assert score(tmp_path, a_row(program, tests=tests)) == [1]


def test_a_response_that_was_cut_is_wrong(tmp_path: Path) -> None:
    cut = a_row("print(2 * int(input()))", finish="length", tests=DOUBLE)
    assert score(tmp_path, cut) == [0]
    assert score(tmp_path, cut, must_end=False) == [1]


def test_rewards_come_in_the_order_of_the_rows(tmp_path: Path) -> None:
    rows = [
        a_row(
            f"import time; time.sleep({0.3 if n % 3 == 0 else 0}); print({n})",
            tests=[{"input": "", "output": str(n if n % 2 else -1)}],
        )
        for n in range(8)
    ]
    assert score(tmp_path, *rows, concurrency=4) == [n % 2 for n in range(8)]


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({}, "its row has no tests"),
        ({"tests": []}, "its row has no tests"),
        ({"tests": "assert"}, "its row has no tests"),
        ({"tests": [{"input": "1"}]}, "number 0 of its `tests`"),
        ({"tests": ["assert f("]}, "its tests do not work"),
        ({"tests": ["assert f() == 1", " "]}, "number 1 of its tests is empty"),
        ({"tests": ["import numpy_\nassert f() == 1"]}, "do not work: ModuleNotFoundError"),
        ({"test": "METADATA = {}", "entry_point": "f"}, "does not define check"),
        (
            {"test": "import nowhere\ndef check(f): pass", "entry_point": "f"},
            "its tests do not work: ModuleNotFoundError",
        ),
        ({"test": None, "entry_point": None, "tests": None}, "its row has no tests"),
    ],
)
def test_a_row_that_cannot_be_tested_is_an_error_that_names_it(
    tmp_path: Path, extra: dict[str, Any], said: str
) -> None:
    row = a_row("def f(): return 1", **extra)
    with pytest.raises(StageError, match=said) as failure:
        score(tmp_path, row)
    assert "prompt p0, sample 1" in str(failure.value)


def test_a_sandbox_that_fails_is_an_error_and_no_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages.rewards.sandbox import root, warm

    isolation()
    monkeypatch.setattr(warm, "_launcher", None)
    monkeypatch.setattr(root, "PROJECT", tmp_path)
    with pytest.raises(StageError, match="the sandbox failed") as failure:
        score(tmp_path, a_row("print(4)", tests=DOUBLE))
    assert "prompt p0, sample 1" in str(failure.value)


def test_running_without_isolation_takes_the_very_words() -> None:
    source = TypeAdapter(AnySource)
    for words in ("yes", "true", UNISOLATED.upper()):
        with pytest.raises(ValidationError, match="in so many words"):
            source.validate_python({"kind": "code", "allow_unisolated": words})
    assert source.validate_python({"kind": "code", "allow_unisolated": UNISOLATED})


@pytest.mark.slow
@pytest.mark.skipif(not HUMANEVAL.exists(), reason="HumanEval is not here")
@pytest.mark.parametrize("body", [None, "    return None\n"], ids=["right", "wrong"])
def test_humaneval_knows_right_from_wrong(body: str | None) -> None:
    """All 164 canonical solutions pass, and none of them does with its body taken out."""
    lines = HUMANEVAL.read_text().splitlines()
    kind, limits = isolation().kind, Limits()

    def results(line: str) -> list[bool]:
        task = json.loads(line)
        response = body or task["canonical_solution"]
        columns = {name: task[name] for name in ("test", "entry_point")}
        exam = exam_of(given(a_row(response, task["prompt"], **columns)))
        return passed(exam.before + program_of(response), exam.tests, limits, kind)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(results, lines)) == [[body is None]] * 164


def test_rows_may_be_looked_at_in_any_number_of_threads() -> None:
    """Python 3.11 itself raises SystemError where threads take turns while they parse."""
    prompt = "".join(f"def f{i}(x):\n    return [y * {i} for y in range(x)]\n" for i in range(10))
    row = given(a_row("", prompt, test="def check(candidate): pass", entry_point="f1"))

    def take_turns(*_: Any) -> None:
        time.sleep(0.0001)

    def look(depth: int) -> str:
        return look(depth - 1) if depth else exam_of(row).before

    usual, interval = gc.get_threshold(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    gc.callbacks.append(take_turns)
    gc.set_threshold(50)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(look, [number % 7 for number in range(700)])) == {f"{prompt}\n"}
    finally:
        gc.set_threshold(*usual)
        sys.setswitchinterval(interval)
        gc.callbacks.remove(take_turns)


def test_imports_of_the_tests_may_be_a_column(tmp_path: Path) -> None:
    tests = ["assert math.isclose(f(2), math.sqrt(2))"]
    rows = [
        a_row("f = lambda x: x ** 0.5", test_list=tests, test_imports=imports)
        for imports in (["import math"], '["import math"]')
    ]
    assert score(tmp_path, *rows) == [1, 1]
    with pytest.raises(StageError, match="`test_imports` is no list of texts"):
        score(tmp_path, a_row("f = 1", test_list=tests, test_imports="import math"))


def test_a_whole_function_may_follow_the_prompt(tmp_path: Path) -> None:
    prompt = 'import math\n\ndef area(r):\n    """The area of a circle."""\n'
    test = "def check(candidate):\n    assert abs(candidate(2) - 12.566) < 0.01\n"
    columns = {"test": test, "entry_point": "area"}
    rows = [
        a_row("    return math.pi * r * r\n", prompt, **columns),
        a_row("```python\ndef area(r):\n    return math.pi * r**2\n```", prompt, **columns),
        a_row("```python\ndef other(r):\n    return 12.566\n```", prompt, **columns),
        a_row("```python\ndef area(r):\n    return 12.566\n```", "Write area(r).", **columns),
    ]
    assert score(tmp_path, *rows) == [1, 1, 0, 1]


def test_what_a_prompt_defines_inside_chat_text_is_not_asked_of_the_program(tmp_path: Path) -> None:
    """The helper of the prompt checks the answer: a program that brings its own checks itself."""
    code = 'def poly(x):\n    return x - 2\n\ndef zero():\n    """Where poly is 0."""\n'
    test = "def check(candidate):\n    assert poly(candidate()) == 0\n"
    chat = f"Complete this function:\n\n```python\n{code}```\nAnswer with code."
    right = "```python\ndef zero():\n    return 2\n```"
    forged = "```python\ndef poly(*_): return 0\ndef zero(): return 7\n```"
    columns = {"test": test, "entry_point": "zero"}
    rows = [a_row(right, chat, **columns), a_row(forged, chat, **columns)]
    assert score(tmp_path, *rows) == [1, 0]
    with pytest.raises(StageError, match="`poly`, which nothing defines"):
        score(tmp_path, a_row(forged, "Write zero().", **columns))
    helped = {**columns, "test_setup_code": code}
    rows = [a_row(right, "Write zero().", **helped), a_row(forged, "Write zero().", **helped)]
    assert score(tmp_path, *rows) == [1, 0]


def test_an_entry_point_may_be_several_names(tmp_path: Path) -> None:
    tests = ["assert decode(encode('ab')) == 'ab' and encode('ab') != 'ab'"]
    right = "def encode(s): return s[::-1]\ndef decode(s): return s[::-1]"
    rows = [
        a_row(right, test_list=tests, entry_point=names)
        for names in (["encode", "decode"], '["encode", "decode"]')
    ]
    assert score(tmp_path, *rows) == [1, 1]
    for wrong in ("no name", 5, [], ["encode", ""]):
        with pytest.raises(StageError, match="`entry_point` is neither a name nor a list of names"):
            score(tmp_path, a_row(right, test_list=tests, entry_point=wrong))


def test_a_program_may_exit_as_python_lets_it(tmp_path: Path) -> None:
    tests = [{"input": "", "output": "4"}]
    programs = {"print(4); exit()": 1, "print(4); quit(0)": 1, "print(4); exit(1)": 0}
    assert score(tmp_path, *(a_row(one, tests=tests) for one in programs)) == [*programs.values()]
