"""Waiting for what another process is about to do."""

import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

PATIENCE_S = 900
"""For anything that ends by itself where the code is right: a machine may starve for minutes."""


def until(
    condition: Callable[[], Any],
    what: str,
    otherwise: Callable[[], str] = lambda: "",
    pause_s: float = 0.05,
) -> Any:
    """What the condition says once it says something; the test fails with `otherwise` if not."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(pause_s)
    pytest.fail(f"not within {PATIENCE_S} s: {what}{otherwise()}")


def answers(address: str) -> bool:
    """Whether a server is up by now."""
    try:
        urllib.request.urlopen(address, timeout=10).close()
    except OSError:
        return False
    return True
