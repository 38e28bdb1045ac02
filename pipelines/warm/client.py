"""A command's side: find the clone's server or start it, and have it fork a process."""

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from pipelines.base.locks import is_locked
from pipelines.base.processes import process_lives, start_of
from pipelines.base.redacted_log import open_log
from pipelines.base.repository import Repository
from pipelines.warm import wire
from pipelines.warm.child import Request
from pipelines.warm.identity import Identity, Kind
from pipelines.warm.title import ROOM

SERVER = "pipelines.warm.server"
START_S = 180.0
"""How long a server may take to import everything; slow disks and full machines included."""
ANSWER_S = 30.0
END_S = 5.0
"""How long a server may take to end; one stays on for those who wait for its children."""
POLL_S = 0.02
MOST = {Kind.CONTROL: 1, Kind.COMPUTE: 2}
"""Servers of a clone: two for stages that differ in their number of threads."""


@dataclass
class Forked:
    """A process that a server has forked, as `subprocess.Popen` would show it."""

    pid: int
    started: str
    connection: socket.socket | None = None
    """Over which the server tells how it ended."""
    returncode: int | None = field(default=None, init=False)

    def poll(self) -> int | None:
        """How it ended; None while it runs."""
        if self.returncode is None and self.connection is not None:
            with suppress(BlockingIOError):
                self.connection.setblocking(False)
                self.connection.recv(1, socket.MSG_PEEK)
                self.connection.setblocking(True)
                answer = wire.receive(self.connection)
                self.connection.close()
                self.connection = None
                if answer is not None:
                    self.returncode = int(answer[0]["status"])
        unknown = self.returncode is None and self.connection is None
        if unknown and not process_lives(self.pid, self.started):
            self.returncode = 1  # how it ended, only the server knew, which is gone
        return self.returncode

    def wait(self) -> int:
        while (status := self.poll()) is None:
            time.sleep(POLL_S)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def fork(
    repository: Repository,
    identity: Identity,
    request: Request,
    files: list[int],
    *,
    waits: bool = False,
) -> Forked | None:
    """Have a process forked, with these files open; None where no server is to be had.

    With `waits`, the server tells how it ended.
    """
    connection = _reach(repository, identity)
    return _ask(connection, request, files, waits=waits) if connection else None


def fork_if_ready(
    repository: Repository, identity: Identity, request: Request, files: list[int]
) -> Forked | None:
    """The same where a server is ready; where none is, one is started for the next command."""
    folder = _folder(repository, identity)
    where = wire.address_of(folder) if is_locked(folder / wire.LOCK) else None
    if where and (connection := wire.connect(where)):
        return _ask(connection, request, files)
    prepare(repository, identity)
    return None


def _ask(
    connection: socket.socket, request: Request, files: list[int], *, waits: bool = False
) -> Forked | None:
    try:
        connection.settimeout(ANSWER_S)
        wire.send(connection, {**asdict(request), "waits": waits}, files)
        answer = wire.receive(connection)
    except OSError:
        connection.close()
        return None
    if answer is None or not waits:
        connection.close()
    if answer is None:
        return None
    pid = int(answer[0]["pid"])
    try:
        started = start_of(pid)
    except psutil.NoSuchProcess:
        started = "ended"  # before anybody could ask when it had begun
    return Forked(pid, started, connection if waits else None)


def prepare(repository: Repository, identity: Identity) -> None:
    """See to it that a server is on its way; returns at once."""
    folder = _folder(repository, identity)
    if not (is_locked(folder / wire.LOCK) or wire.is_refused(folder)):
        with suppress(OSError):
            _start(repository, identity)


def end_servers(repository: Repository) -> list[str]:
    """End every server of the clone; what runs in their children goes on. Returns their names."""
    ended = list(filter(_lives, _all(_home(repository))))
    for folder in ended:
        if not _end(folder, "a command told it to") and (pid := wire.living_process(folder)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # it still imports, and has forked nothing
    deadline = time.monotonic() + END_S
    while any(map(wire.living_process, ended)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return [folder.name for folder in ended]


def _reach(repository: Repository, identity: Identity) -> socket.socket | None:
    """A connection to the server of this identity, which is started where there is none."""
    folder = _folder(repository, identity)
    process = None
    if wire.is_refused(folder):
        return None
    before = wire.address_of(folder)
    if is_locked(folder / wire.LOCK):
        before = None
    else:
        try:
            process = _start(repository, identity)
        except OSError:
            return None  # a full disk, or no process to be had: the job itself says so better
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        where = wire.address_of(folder)
        if where == before:
            where = None  # said by one that has ended
        if where and (connection := wire.connect(where)):
            return connection
        lives = is_locked(folder / wire.LOCK)
        if (lives and where) or (not lives and _has_ended(process)):
            return None  # one that cannot be reached from here, or that could not start
        time.sleep(POLL_S)
    return None


def _has_ended(process: "subprocess.Popen[bytes] | None") -> bool:
    return process is None or process.poll() is not None


def _start(repository: Repository, identity: Identity) -> "subprocess.Popen[bytes]":
    _end_unneeded(repository, identity)
    folder = _folder(repository, identity)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.parent.chmod(0o700)
    folder.mkdir(exist_ok=True)
    variables = {"PYTHONPATH": str(identity.code), "PYTHONSAFEPATH": "1"}
    words = ["-m", SERVER, str(folder), identity.kind, ROOM]
    with open_log(folder / "log") as log:
        process = subprocess.Popen(
            [*identity.python, *words],
            cwd=repository.root,
            env={**identity.environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    with suppress(psutil.NoSuchProcess):  # ended already, for a reason that its log has
        wire.note_process(folder, process.pid)
    return process


def _end_unneeded(repository: Repository, identity: Identity) -> None:
    """End the servers that nobody needs any more, and forget those that have ended."""
    home = _home(repository)
    mine = _folder(repository, identity)
    others = [path for path in _all(home) if path != mine]
    for folder in others:
        if not _lives(folder):
            shutil.rmtree(folder, ignore_errors=True)
    living = [
        path for path in others if path.name.startswith(f"{identity.kind}-") and path.exists()
    ]
    living.sort(key=lambda path: (path / wire.LOCK).stat().st_mtime if path.exists() else 0.0)
    for folder in living[: max(len(living) - MOST[identity.kind] + 1, 0)]:
        _end(folder, "one with other code or settings takes its place")


def _end(folder: Path, why: str) -> bool:
    """Tell a server to end; False where none listens yet."""
    if (where := wire.address_of(folder)) and (connection := wire.connect(where)):
        with connection, suppress(OSError):
            wire.send(connection, {"end": why})
        return True
    return False


def _lives(folder: Path) -> bool:
    """Whether a server has its lock, or is on its way to it."""
    return is_locked(folder / wire.LOCK) or wire.living_process(folder) is not None


def _all(home: Path) -> list[Path]:
    return sorted(path for path in home.glob("*-*") if path.is_dir())


def _home(repository: Repository) -> Path:
    return repository.home / "warm"


def _folder(repository: Repository, identity: Identity) -> Path:
    return _home(repository) / identity.name
