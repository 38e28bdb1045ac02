"""Sessions: what stays from one execution to the next, what each may use, and that nothing of one
session reaches another."""

import contextlib
import functools
import gc
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.rewards.sandbox.isolation import isolation
from stages.rewards.sandbox.session import Execution, Session
from stages.rewards.sandbox.values import IsolationKind, Limits, SandboxBroken, Status
from tests.sandbox.attack import below, survivors
from tests.sandbox.neighbours import ATTACKS, HARMLESS
from tests.sandbox.test_attacks import EVERYBODY, Who, why_not
from tests.waiting import TIMEOUT_S, until

KIND = isolation().kind
LIMITS = Limits(cpu_s=1, wall_s=TIMEOUT_S, memory_mb=256)
SMALL = Limits(cpu_s=1, wall_s=60, memory_mb=128, processes=8, output_kb=2)
pytestmark = pytest.mark.skipif(KIND is IsolationKind.NONE, reason=isolation().detail)
IMPORTS = "import os, subprocess, sys"
Open = Callable[..., Session]


@pytest.fixture
def opened() -> Iterator[Open]:
    sessions: list[Session] = []

    def open_one(limits: Limits = LIMITS, seed: int = 0) -> Session:
        sessions.append(Session(seed, limits, KIND))
        return sessions[-1]

    yield open_one
    for session in sessions:
        session.close()


def of_this_test() -> set[int]:
    """Processes that it started; one that only waits to be reaped has no memory."""
    return {pid for pid, pages in below(os.getpid()).items() if pages}


def test_variables_imports_and_files_stay(opened: Open) -> None:
    session = opened()
    assert (
        session.execute("import math\nx = math.floor(2.5)\nopen('f', 'w').write('kept')").ended
        is None
    )
    assert session.execute("def f(n):\n    return x + n") == Execution("")
    assert session.execute("print(f(1))\nx += 1\nf(1), open('f').read()").text == "3\n(4, 'kept')"
    assert session.execute("open('own.py', 'w').write('y = 7')").text == "5"
    assert session.execute("import own\nown.y, __name__").text == "(7, '__main__')"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("1 + 1", "2"),
        ("None", ""),
        ("x = 1", ""),
        ("", ""),
        (f"{IMPORTS}\nprint('a'); print('b', file=sys.stderr)\nos.write(1, b'c')", "a\nb\nc1"),
        ("print('before')\n1 / 0", "before\nZeroDivisionError: division by zero\n"),
        ("x = (", "SyntaxError: '(' was never closed\n"),
        ("'\\ud800'", "'\\ud800'"),
        ("print('\\udcff')", "\ufffd\n"),
        ("x\0y", "SyntaxError: source code string cannot contain null bytes"),
        ("input()", "EOFError: EOF when reading a line\n"),
        ("exit()", "SystemExit"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt\n"),
        ("class E(Exception):\n    def __str__(self): 1 / 0\nraise E", "E: <exception str() fail"),
        (f"{IMPORTS}\nsubprocess.run([sys.executable, '-S', '-c', 'print(5)']).returncode", "5\n0"),
    ],
)  # fmt: skip
def test_the_text_is_what_it_printed_and_its_last_value_or_error(
    opened: Open, code: str, text: str
) -> None:
    session = opened()
    assert session.execute(code).text.startswith(text)
    assert session.execute("'goes on'") == Execution("'goes on'")


def test_a_child_that_the_code_forks_is_no_second_interpreter(opened: Open) -> None:
    session = opened()
    own = session.execute("import os\nos.getpid()").text
    code = "if child := os.fork():\n    os.waitpid(child, 0)\n'once'"
    assert session.execute(code).text == "'once'"
    assert session.execute("os.getpid()").text == own


def test_code_that_is_longer_than_a_pipe_arrives_whole(opened: Open) -> None:
    data = os.urandom(1 << 20).hex()
    code = f"data = {data!r}\nimport hashlib\nlen(data)"
    assert opened().execute(code).text == str(1 << 21)


def test_random_numbers_follow_from_the_seed_alone(opened: Open) -> None:
    code = "import random\nrandom.random(), random.sample(range(99), 5), list({'a', 'b', 'c', 'd'})"
    one, same, other = (opened(seed=seed).execute(code).text for seed in (1, 1, 2))
    assert one == same != other


def test_limits_of_time_are_of_one_execution(opened: Open) -> None:
    """Three of them take more together than one may; many in one are ended."""
    session = opened()
    code = "import time\nbegun = time.process_time()\nwhile time.process_time() - begun < 0.7: pass"
    for _ in range(3):
        assert session.execute(code).ended is None
    assert session.execute("\n".join([code] * 30)).ended is Status.CPU


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("while True: pass", Status.CPU),
        ("import os\nfor _ in range(2): os.fork()\nwhile True: pass", Status.CPU),
        ("import time; time.sleep(600)", Status.TIMEOUT),
        ("import os, time; os.closerange(3, 64); time.sleep(600)", Status.TIMEOUT),
        ("print('x' * 5000)", Status.OUTPUT),
        ("import os\nif os.fork() == 0:\n    while True: print('x', flush=True)", Status.OUTPUT),
        ("import os; os._exit(3)", Status.FINISHED),
        ("import os; os.closerange(3, 64)", Status.FINISHED),
        ("import os; os.kill(os.getpid(), 9)", Status.KILLED),
        ("import ctypes; ctypes.string_at(0)", Status.CRASHED),
    ],
)  # fmt: skip
def test_an_execution_that_ends_the_session_says_how(opened: Open, code: str, how: Status) -> None:
    before = of_this_test()
    session = opened(replace(SMALL, wall_s=2) if how is Status.TIMEOUT else SMALL)
    done = session.execute(code)
    # What prints on after its answer may be seen by the next one.
    for _ in range(50):
        done = done if done.ended else session.execute("import time; time.sleep(0.05)")
    assert done == Execution("", how)
    until(lambda: not of_this_test() - before, "all of it is gone")
    with pytest.raises(ValueError, match="has ended"):
        session.execute("1")


def test_too_much_memory_is_an_error_in_the_code_and_the_session_goes_on(opened: Open) -> None:
    session = opened()
    assert session.execute("x = 1\ny = bytearray(1 << 30)").text == "MemoryError\n"
    assert session.execute("x").text == "1"


def test_what_runs_on_between_two_executions_is_counted(opened: Open) -> None:
    before = of_this_test()
    session = opened()
    code = "import os\nif os.fork() == 0:\n    while True: pass\n'answered'"
    assert session.execute(code).text == "'answered'"
    until(lambda: not of_this_test() - before, "its supervisor has ended it")
    assert session.execute("1") == Execution("", Status.CPU)


def test_an_answer_that_the_code_forges_harms_nobody_else(opened: Open) -> None:
    attacker, other = opened(SMALL), opened()
    code = f"{IMPORTS}\nfor end in range(3, 64):\n try: os.write(end, b'd')\n except OSError: pass"
    for _ in range(3):
        attacker.execute(code)
    done = attacker.execute("while True: pass")
    for _ in range(50):
        done = done if done.ended else attacker.execute("1")
    assert done.ended is Status.CPU
    assert other.execute("'fine'").text == "'fine'"


def test_what_is_asked_after_a_forged_answer_is_asked_all_the_same(opened: Open) -> None:
    session = opened()
    forged = "for end in range(3, 64):\n try: os.write(end, b'd')\n except OSError: pass"
    session.execute(f"import os, time\n{forged}\ntime.sleep(0.2)")
    time.sleep(0.8)  # by now its own answer lies there, which nobody waits for
    session.execute("kept = 'here'")
    assert "'here'" in "".join(session.execute("kept").text for _ in range(5))


def test_a_sandbox_that_is_killed_is_an_error(opened: Open) -> None:
    before = of_this_test()
    session = opened()
    session.execute("x = 1")
    for pid in sorted(of_this_test() - before):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with pytest.raises(SandboxBroken, match="without reporting a result"):
        session.execute("x")


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_session_that_nobody_has_any_more_ends() -> None:
    gc.collect()  # what other tests have left takes its descriptors along
    before = of_this_test()
    descriptors = open_descriptors()
    session = Session(0, LIMITS, KIND)
    session.execute("x = 1")
    assert len(of_this_test() - before) >= 2
    del session
    gc.collect()
    until(lambda: not of_this_test() - before, "its processes are gone")
    assert open_descriptors() == descriptors


CALLER = """
import sys, time
from stages.rewards.sandbox.session import Session
from stages.rewards.sandbox.values import IsolationKind, Limits
session = Session(0, Limits(), IsolationKind(sys.argv[1]))
print(session.execute(sys.argv[2]), flush=True)
time.sleep(600)
"""


def test_a_session_does_not_outlive_its_caller() -> None:
    nonce = f"nonce{secrets.token_hex(8)}"
    code = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)", "{nonce}"])"""
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, KIND, code],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": "."},
        cwd=Path(__file__).resolve().parents[2],
    )
    try:
        assert caller.stdout is not None
        assert b"Popen" in caller.stdout.readline()
        # The caller's own arguments have it too.
        assert len(survivors(nonce)) == 2
    finally:
        caller.kill()
        caller.wait()
    until(lambda: not survivors(nonce), "the child is gone")


def test_many_sessions_are_open_at_a_time_whatever_the_numbers_of_their_descriptors() -> None:
    """More than select(2) knows, and than a process may have open unless it asks for more."""
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    sessions = [Session(seed, LIMITS, KIND) for seed in range(20)]
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda s: s.execute("import random; own = random.random()"), sessions))
            found = list(pool.map(lambda s: s.execute("own").text, sessions))
        assert len(set(found)) == len(sessions)
    finally:
        for session in sessions:
            session.close()
        for end in held:
            os.close(end)


PIPES = """
import json, os
def of(end):
    try: return list(os.fstat(end)[:3])
    except OSError: return None
json.dumps([of(end) for end in range(4096) if of(end)])
"""


def test_sessions_share_no_descriptor(opened: Open) -> None:
    """But for what leads nowhere."""
    nowhere = Path(os.devnull).stat().st_ino
    ends = []
    for session in (opened(), opened()):
        found = json.loads(session.execute(PIPES).text.strip("'"))
        ends.append({(device, inode) for _, inode, device in found if inode != nowhere})
    assert len(ends[0]) == len(ends[1]) == 3
    assert not ends[0] & ends[1]


@functools.cache
def leaks(who: Who) -> dict[str, list[str]]:
    script = Path(__file__).with_name("neighbours.py")
    names = ATTACKS if who.kind is not IsolationKind.NONE else HARMLESS
    command = [*who.prefix, who.python, "-B", str(script), who.kind, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@EVERYBODY
@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_of_a_session_reaches_another(who: Who, name: str) -> None:
    if reason := why_not(who):
        pytest.skip(reason)
    assert leaks(who)[name] == []


FROM_A_THREAD = """
import os, resource, sys, threading, time
from stages.rewards.sandbox.session import Session
from stages.rewards.sandbox.values import IsolationKind, Limits
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
opened = []
def begin():
    opened.append(Session(0, Limits(), IsolationKind(sys.argv[1])))
thread = threading.Thread(target=begin)
thread.start()
thread.join()
time.sleep(0.5)
print(opened[0].execute("1 + 1"))
opened[0].close()
"""


@EVERYBODY
def test_a_session_outlives_the_thread_that_has_opened_it(who: Who) -> None:
    """Also where its descriptors have numbers that select(2) does not know."""
    if reason := why_not(who):
        pytest.skip(reason)
    done = subprocess.run(
        [*who.prefix, who.python, "-B", "-c", FROM_A_THREAD, who.kind],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"{Execution('2')}\n", done.stderr


def test_the_checks_notice_what_leaks_where_nothing_is_isolated() -> None:
    found = leaks(Who("me", (), sys.executable, IsolationKind.NONE))
    assert [name for name in HARMLESS if not found[name]] == []
