"""Reward functions: what they are given, and how one that misbehaves is named and ended."""

import os
import signal
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import pytest

from pipelines.base.processes import lives
from stages.context import Context, StageError, Stopped
from stages.rewards.given import given
from stages.rewards.named import NamedSource, named_pass, open_scorer
from tests.rewards.conftest import row
from tests.waiting import FOR_EVER_S, TIMEOUT_S, must_not_wait, until

ROWS = [row(str(number), index=number, level=number * 10) for number in range(5)]


def failure(score, folder: Path, **params) -> str:
    with pytest.raises(StageError) as caught:
        score(ROWS, folder, kind="function", **params)
    return str(caught.value)


IN_MANY_WAYS = {
    "by the columns that it names": (
        """
def f(prompts, responses, answers, finish_reasons, response_ids, level, other=7):
    assert other == 7 and finish_reasons == ['stop'] * len(prompts)
    assert all(p.startswith('What is') for p in prompts) and answers == ['4'] * len(prompts)
    assert [len(i) for i in response_ids] == [1] * len(prompts)
    return [l / 10 for r, l in zip(responses, level) if int(r) * 10 == l]""",
        {},
    ),
    "by any column": (
        """
def f(responses, **columns):
    assert {'prompts', 'answers', 'level', 'prompt_ids'} <= set(columns)
    return [float(r) for r in responses]""",
        {},
    ),
    "by position alone": ("def f(responses, /, answers): return [float(r) for r in responses]", {}),
    "with numbers of numpy": (
        "import numpy\ndef f(responses): return [numpy.float32(r) for r in responses]",
        {},
    ),
    "with arrays of one number": (
        "import numpy\ndef f(responses): return [numpy.array(int(r)) for r in responses]",
        {},
    ),
    "as a lambda": ("f = lambda responses: tuple(map(int, responses))", {}),
    "as a coroutine with neighbours and arrays": (
        """
import asyncio, helper, numpy
async def f(responses):
    await asyncio.sleep(0.01)
    return numpy.array([2 * float(r) for r in responses]) * helper.factor""",
        {"concurrency": 2, "batch_size": 1},
    ),
    "with what it keeps for every batch": (
        """
import asyncio
few = asyncio.Semaphore(1)
async def one(response):
    async with few:
        await asyncio.sleep(0.001)
        return float(response)
async def f(responses):
    return await asyncio.gather(*map(one, responses))""",
        {"batch_size": 2},
    ),
    # Both processes come back from the fork; the second answer must not go to the next batch.
    "with a fork": (
        "import os\ndef f(responses): os.fork(); return [float(r) for r in responses]",
        {"batch_size": 1},
    ),
}


@pytest.mark.parametrize("way", IN_MANY_WAYS)
def test_functions_may_be_written_in_many_ways(score, functions, way) -> None:
    code, params = IN_MANY_WAYS[way]
    folder = functions(mine=code, helper="import numpy\nfactor = numpy.float32(0.5)\n")
    rewards = score(ROWS, folder, kind="function", function="mine:f", **params)
    assert rewards == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert not list(folder.rglob("__pycache__")), "importing has changed an input"


def test_batches_are_as_long_as_asked(score, functions) -> None:
    folder = functions(mine="def f(responses): return [len(responses)] * len(responses)")
    rewards = score(ROWS, folder, kind="function", function="mine:f", batch_size=2)
    assert rewards == [2.0, 2.0, 2.0, 2.0, 1.0]


def test_what_a_function_prints_does_not_disturb(score, functions, capfd) -> None:
    folder = functions(
        mine="import os, sys\n"
        "print('hello at import')\n"
        "def f(responses):\n"
        "    print('{\"rewards\": [9]}')\n"
        "    os.write(1, b'raw words')\n"
        "    assert sys.stdin.read() == ''\n"
        "    return [1 for _ in responses]\n"
    )
    assert score(ROWS, folder, kind="function", function="mine:f") == [1.0] * 5
    assert "raw words" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            "def f(responses):\n    return [1 / (3 - int(r)) for r in responses]\n",
            [
                "reward 'mine' (rewards/mine.py:f) raised ZeroDivisionError: division by zero",
                "(mine.py:2) for prompt p1, sample 1 ('What is 2 + 2, for the 3th time?')",
            ],
        ),
        # Two rows are needed for a spread: each alone fails, and is not at fault for that.
        (
            """
import statistics
def f(responses):
    spread = statistics.stdev(map(float, responses))
    return [1 / (3 - int(r)) * spread for r in responses]""",
            [
                "raised ZeroDivisionError: division by zero (mine.py:5) for 5 rows",
                "though no row of them does so by itself",
            ],
        ),
        (
            "def f(responses):\n    assert len(responses) == 1, 'one'\n    return [0]\n",
            [
                "AssertionError: one",
                "5 rows from prompt p0, sample 0",
                "though no row of them does so by itself",
            ],
        ),
        ("def f(responses): raise SystemExit('no licence')", ["raised SystemExit: no licence"]),
        ("async def f(responses): exit(3)", ["raised SystemExit: 3"]),
        ("def f(responses): raise KeyboardInterrupt", ["raised KeyboardInterrupt"]),
        ("import os\ndef f(responses): os._exit(3)", ["its process exited with code 3"]),
        ("raise SystemExit('no licence')", ["cannot be loaded: importing"]),
        ("f = max", ["cannot be loaded: its parameters have no names"]),
    ],
)
def test_a_function_that_fails_is_named_with_its_rows(score, functions, function, said) -> None:
    message = failure(score, functions(mine=function), function="mine:f")
    assert [part for part in said if part not in message] == []


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("[1] * (len(responses) - 1)", "returned 4 numbers for 5 responses"),
        ("None", "returned None (NoneType), not a list of 5 numbers"),
        ("'12345'", "returned '12345' (str), not a list of 5 numbers"),
        ("[1, 1, 'x', 1, 1]", "returned 'x' (str), not a number for prompt p1, sample 0"),
        ("[1, None, 1, 1, 1]", "returned None (NoneType), not a number for prompt p0, sample 1"),
        ("{float(r) for r in responses}", "(set), not a list of 5 numbers"),
        ("[1, 1, 10 ** 400, 1, 1]", "which no float can hold for prompt p1, sample 0"),
        ("[1, 1, 1, 1, float('nan')]", "returned nan for prompt p2, sample 0"),
        ("[1, 1, 1, float('-inf'), 1]", "returned -inf for prompt p1, sample 1"),
    ],
)
def test_wrong_returns_are_refused(score, functions, returned, said) -> None:
    folder = functions(mine=f"def f(responses):\n    return {returned}\n")
    assert said in failure(score, folder, function="mine:f")


def isolated_processes() -> list[list[str]]:
    """The command lines of what runs functions apart and lives."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found.append(process.cmdline())
    return [words for words in found if "isolated" in str(words)]


@pytest.mark.slow
@must_not_wait
def test_a_hang_is_ended_and_named_even_inside_c(score, functions) -> None:
    """Sorting by hand in Python could be interrupted; this power of a number cannot."""
    folder = functions(
        mine="def f(responses):\n"
        "    return [(9 ** (9 ** 9)) % 7 if r == '2' else 1.0 for r in responses]\n"
    )
    said = failure(score, folder, function="mine:f", timeout=10.0)
    assert "(rewards/mine.py:f) did not return within 10 s for prompt p1, sample 0" in said
    assert not isolated_processes()


def test_a_process_that_dies_is_named(score, functions) -> None:
    code = "import os\ndef f(responses): '1' in responses and os.abort(); return [0]"
    folder = functions(mine=code)
    said = failure(score, folder, function="mine:f", batch_size=1)
    assert "its process" in said
    assert "for prompt p0, sample 1" in said


DAEMON = """
import os, pathlib, signal, subprocess, time
def daemon(environment):
    if not os.fork():
        os.setsid()
        nothing = subprocess.DEVNULL
        child = subprocess.Popen(["sleep", "4000"], env=environment, stdout=nothing, stderr=nothing)
        pathlib.Path(__file__).with_name("daemon").write_text(str(child.pid))
        os._exit(0)
    os.wait()
def returns(responses):
    daemon({})
    return [1.0] * len(responses)
def hangs(responses):
    daemon({})
    time.sleep(4000)
def is_killed(responses):
    daemon({})
    os.kill(os.getpid(), signal.SIGKILL)
def is_left_alone(responses):
    daemon(None)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(4000)
"""


@must_not_wait
@pytest.mark.parametrize("function", ["returns", "hangs", "is_killed", "is_left_alone"])
def test_a_daemon_ends_with_the_function_that_started_it(score, functions, function) -> None:
    """It is in another session, with another parent."""
    folder = functions(mine=DAEMON)
    # Of those that do not hang none may be late.
    timeout = 10.0 if function == "hangs" else TIMEOUT_S
    params = {"kind": "function", "function": f"mine:{function}", "timeout": timeout}
    with nullcontext() if function == "returns" else pytest.raises(StageError):
        score(ROWS[:1], folder, **params)
    left = int((folder / "daemon").read_text())
    try:
        assert not psutil.pid_exists(left) or not lives(psutil.Process(left))
        assert not isolated_processes()
    finally:
        with suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("other:f", "there is no file"),
        ("mine:g", "has no function g"),
        ("broken:f", "raised ModuleNotFoundError: No module named 'not_there'"),
        ("json:f", "rename"),
        ("mine:asks", "asks for weather, which no row has; there are prompts, responses"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_named(score, functions, function, said) -> None:
    folder = functions(
        mine="def asks(weather):\n    return []\ndef f(responses):\n    return []\n",
        broken="import not_there\n",
        json="def f(responses): return []\n",
    )
    assert said in failure(score, folder, function=function)


@must_not_wait
def test_stopping_ends_a_call_under_way(ctx: Context, functions) -> None:
    folder = functions(
        mine="import time, pathlib\n"
        "def f(responses):\n"
        "    pathlib.Path(__file__).with_name('begun').touch()\n"
        "    time.sleep(4000)\n"
    )
    from stages.contracts.rewards import Function

    params = Function(kind="function", function="mine:f", timeout=FOR_EVER_S)
    source = NamedSource("mine", params, folder)
    plain = [given(item) for item in ROWS]
    scorer = open_scorer(ctx, source, plain)
    asked = ctx.should_stop
    ctx.should_stop = lambda: (folder / "begun").exists() or asked()  # type: ignore[method-assign]
    with pytest.raises(Stopped):
        scorer.score(plain)
    scorer.close()


def test_finished_units_outlive_a_failure(ctx: Context, functions, monkeypatch) -> None:
    """The second unit fails; when the function is mended, the first is not computed again."""
    from stages.contracts.rewards import Function
    from stages.engines.processes.parts import collect, fill

    monkeypatch.setattr("stages.rewards.named.UNIT_ROWS", 2)
    text = "def f(responses):\n    open({!r}, 'a').write(' '.join(responses) + '|')\n    {}\n"
    calls = ctx.folder / "calls"
    source = NamedSource(
        "mine", Function(kind="function", function="mine:f"), ctx.folder.parent / "rewards"
    )
    functions(mine=text.format(str(calls), "return [1 / (2 - int(r)) for r in responses]"))
    with pytest.raises(StageError, match="p1, sample 0"):
        fill(ctx, named_pass(ctx, "rewards-mine", source, ROWS))
    assert calls.read_text().startswith("0 1|2 3|")
    calls.unlink()
    functions(mine=text.format(str(calls), "return [float(r) for r in responses]"))
    work = named_pass(ctx, "rewards-mine", source, ROWS)
    fill(ctx, work)
    assert calls.read_text() == "2 3|4|"
    assert collect(ctx, work) == [0.5, 1.0, 2.0, 3.0, 4.0]


def test_the_worker_ends_with_its_parent(functions) -> None:
    """A parent that is killed outright leaves no process behind."""
    import subprocess
    import sys

    folder = functions(mine=DAEMON)
    order = {"function": "mine:hangs", "folder": str(folder), "columns": ["responses"]}
    program = (
        "from stages.rewards.isolated import Isolated\n"
        f"Isolated({order}).score([{{'response': '', 'extra': {{}}}}], 3000)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=Path.cwd())
    said = folder / "daemon"
    pid = until(lambda: said.exists() and said.read_text(), "it works", at_work=parent)
    below = [psutil.Process(int(pid)), *psutil.Process(parent.pid).children(recursive=True)]
    parent.kill()
    parent.wait()
    try:
        until(lambda: not any(map(lives, below)), "all of them are gone")
    finally:
        for process in below:
            with suppress(psutil.NoSuchProcess):
                process.kill()
