"""Waiting for what another process is about to do."""

import time
from collections.abc import Callable
from typing import Any

import pytest


def until(
    condition: Callable[[], Any],
    what: str,
    seconds: float = 60,
    otherwise: Callable[[], str] = lambda: "",
) -> Any:
    """What the condition says once it says something; the test fails with `otherwise` if not."""
    deadline = time.monotonic() + 3 * seconds  # the machine may be busy
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    pytest.fail(f"not within {seconds} s: {what}{otherwise()}")
