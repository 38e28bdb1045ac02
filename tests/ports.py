"""Ports for servers that are started a while after a test has chosen one.

They lie below those that the kernel gives to outgoing connections, so that none of these takes one
in the meantime. Each test process has a range of its own, away from Slurm's daemons, and hands out
every port once.
"""

import os
import socket
from collections.abc import Iterator

import pytest

_FIRST, _EACH, _RANGES = 10_000, 500, 20


def free_port() -> int:
    """A port of this machine that nobody listens at, and that no other test is given."""
    for port in _untried:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    pytest.fail("no port is left to this test process")


def _own_range() -> Iterator[int]:
    place = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _RANGES
    # Two runs of the tests on one machine begin at different places.
    begin = os.getpid()
    for step in range(_EACH):
        yield _FIRST + place * _EACH + (begin + step) % _EACH


_untried = _own_range()
