"""The driver of a stage under a plain `dvc repro`, forked from a server that is ready.

DVC starts `python -m pipelines stage NAME` in a shell. That process would spend half a second on
imports, so it has the driver forked and stands in for it. Always true:
- Signals that it receives reach the driver; it ends as the driver does, and with its status.
- If either of them is killed, so is the other: each holds an end of a socket.
- Where no server is ready it drives the stage itself, and the next stage finds a server.
"""

import atexit
import importlib
import os
import re
import signal
import socket
import struct
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.config.chosen_profile import profile_name
from pipelines.identity.snapshot import take_snapshot
from pipelines.ledger.invocation import act_for
from pipelines.warm.child import Request
from pipelines.warm.client import Forked, fork_if_ready
from pipelines.warm.identity import Identity, Kind, is_switched_off

KILLED = 128 + signal.SIGKILL
"""As a shell reports it."""
_FORWARDED: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DEBUGS = re.compile(r"^executor:\s*[\"']?debug", re.MULTILINE)
_PEER = struct.Struct("3i")


def run_forked(arguments: list[str]) -> int | None:
    """Have the driver with these arguments forked: its status, or None where it is not forked."""
    if is_switched_off():
        return None
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in _FORWARDED
    }
    mine, theirs = socket.socketpair()
    with mine:
        with theirs:
            forked = _fork(arguments, theirs)
        if forked is None:
            for number, handler in before.items():
                signal.signal(number, handler)
            for missed in received:
                signal.raise_signal(missed)
            return None
        pid = forked.pid

        def forward(number: int, _: Any = None) -> None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

        for number in _FORWARDED:
            signal.signal(number, forward)
        for missed in received:
            forward(missed)
        status = mine.recv(1)
    return status[0] if status else KILLED


def _fork(arguments: list[str], socket_of_driver: socket.socket) -> Forked | None:
    try:
        repository = Repository.find()
        if _debugs(repository):
            return None
        code = take_snapshot(repository)
        identity = Identity(Kind.CONTROL, (sys.executable,), code, dict(os.environ))
        request = Request.from_here("pipelines", arguments, dict(os.environ), str(Path.cwd()))
        files = [0, 1, 2, socket_of_driver.fileno()]
        return fork_if_ready(repository, identity, request, files)
    except (LockstepError, OSError, ValueError):
        return None  # what is wrong, the driver itself says better


def _debugs(repository: Repository) -> bool:
    """Whether the stage runs in its driver, under a debugger that needs the terminal."""
    profile = repository.root / f"slurm_profiles/{profile_name()}.yaml"
    return bool(_DEBUGS.search(profile.read_text(encoding="utf-8")))


def drive(arguments: list[str], file: int) -> int:
    """In the forked process: the driver, for the process at the other end of this socket."""
    other = socket.socket(fileno=file)
    peer = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    act_for(_PEER.unpack(peer)[0])
    threading.Thread(target=_die_with, args=(other,), daemon=True).start()
    status = 1

    def tell() -> None:
        with suppress(OSError):
            other.send(bytes([status & 0xFF]))

    atexit.register(tell)  # after everything else that this process does
    status = run_command(arguments)
    return status


def _die_with(other: socket.socket) -> None:
    """Nobody but the process at the other end knows of this one."""
    with suppress(OSError):
        other.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


def run_command(arguments: list[str]) -> int:
    """`python -m pipelines` with these arguments, in a process that was forked for it."""
    try:
        # Found by name: this room knows no command.
        return int(importlib.import_module("pipelines.commands.cli").main(arguments) or 0)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
