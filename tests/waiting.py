"""Waiting for what another process is about to do."""

import math
import os
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

TIMEOUT_S = 900
"""For anything that ends by itself where the code is right: a machine may starve for minutes."""


must_not_wait = pytest.mark.timeout(TIMEOUT_S)
"""For a test where something waits for much longer than that, unless the code is right."""
FOR_EVER_S = 4 * TIMEOUT_S
LOOK_S = 2.0
"""Between two looks at who is at work: some are costly."""
COSTLY = 2.0
"""How much longer the pause after a look is than the look itself."""
LAST_S = 60.0
"""For word of what the last one did to get here, once nobody is at work any more."""


def until(
    condition: Callable[[], Any],
    what: str,
    otherwise: Callable[[], str] = lambda: "",
    pause_s: float = 0.05,
    at_work: Callable[[], object] | subprocess.Popen[Any] = lambda: True,
) -> Any:
    """What the condition says once it says something; the test fails with `otherwise` if not.

    It fails soon where nobody is at work any more who could bring it about. The last look is one
    that begins after the time is up: whoever waits may be the one that was held up.
    """
    if not callable(at_work):
        process = at_work
        at_work, otherwise = lambda: process.poll() is None, lambda: said_by(process)
    deadline = time.monotonic() + TIMEOUT_S
    looks, left = time.monotonic() + LOOK_S, math.inf
    while True:
        now = time.monotonic()
        value = condition()
        if value:
            return value
        if now >= min(deadline, left):
            break
        if now > looks:
            looks = now + LOOK_S
            # Who is about to begin is not seen at work yet, but may be at the next look.
            left = math.inf if at_work() else min(left, time.monotonic() + LAST_S)
        # What is waited for needs the cores that a costly look takes.
        time.sleep(max(pause_s, COSTLY * (time.monotonic() - now)))
    why = "nobody is at work on it any more" if left < deadline else f"not within {TIMEOUT_S} s"
    pytest.fail(f"{why}: {what}{otherwise()}")


def until_said(process: subprocess.Popen[str], words: str) -> str:
    """What a process has printed, up to the line with these words."""
    assert process.stdout
    lines = []
    limit = threading.Timer(TIMEOUT_S, process.kill)
    limit.start()
    try:
        for line in process.stdout:
            lines.append(line)
            if words in line:
                return "".join(lines)
    finally:
        limit.cancel()
    pytest.fail(f"it never said {words!r}, but\n{''.join(lines)}")


def ended(process: subprocess.Popen[str]) -> str:
    """What a process has printed, once it has ended."""
    output, _ = process.communicate(timeout=TIMEOUT_S)
    return output


def succeeded(process: subprocess.Popen[str]) -> str:
    output = ended(process)
    assert process.returncode == 0, output
    return output


def failed(process: subprocess.Popen[str]) -> str:
    output = ended(process)
    assert process.returncode != 0, output
    return output


def stop(process: subprocess.Popen[str], how: signal.Signals = signal.SIGTERM) -> str:
    """Signal all that a command has started, and wait for its end."""
    with suppress(ProcessLookupError):  # it has just ended by itself
        os.killpg(process.pid, how)
    return ended(process)


def said_by(process: subprocess.Popen[Any]) -> str:
    """How a process has ended and what it had said, where it said it to us."""
    if process.poll() is None or not process.stdout:
        return f"; its process: {process.poll()}"
    return f"; its process ended with {process.returncode} and said\n{process.stdout.read()}"


def answers(address: str) -> bool:
    """Whether a server is up by now."""
    try:
        urllib.request.urlopen(address, timeout=10).close()
    except OSError:
        return False
    return True
