"""What a command and a server say to each other: one request with open files, then answers.

A message is its length and JSON. The socket has no place in the file system, where a copy of the
clone would have it too: the server writes its name into a file that only its user may read, and
each side looks whether the other is that user.
"""

import json
import os
import secrets
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipelines.base import atomic
from pipelines.base.processes import process_lives, start_of

LOCK = "alive"
"""The file that a server has locked while it lives."""
_ADDRESS = "address"
_PROCESS = "process"
_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")
_MOST_FILES = 8


def listen(folder: Path, lock: int) -> socket.socket:
    """The end of the server that holds this lock."""
    name = f"lockstep-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")
    listener.listen(64)
    atomic.write_json(folder / _ADDRESS, {"name": name, "lock": os.fstat(lock).st_ino})
    return listener


def forget(folder: Path) -> None:
    """Remove what a server has said that lived here before."""
    (folder / _ADDRESS).unlink(missing_ok=True)


def address_of(folder: Path) -> dict[str, Any] | None:
    """Where the folder's server says that it listens; in a copy of the folder nobody does."""
    return _of_this_folder(folder, _ADDRESS)


def note_process(folder: Path, pid: int) -> None:
    """Say which process is the server, long before it can say where it listens."""
    (folder / LOCK).touch()
    what = {"pid": pid, "started": start_of(pid), "lock": (folder / LOCK).stat().st_ino}
    atomic.write_json(folder / _PROCESS, what)


def living_process(folder: Path) -> int | None:
    """The number of the server's process, while it is there."""
    noted = _of_this_folder(folder, _PROCESS)
    lives = noted is not None and process_lives(noted["pid"], noted["started"])
    return noted["pid"] if noted and lives else None


def _of_this_folder(folder: Path, name: str) -> dict[str, Any] | None:
    noted = atomic.read_json(folder / name)
    try:
        return noted if noted and noted["lock"] == (folder / LOCK).stat().st_ino else None
    except FileNotFoundError:
        return None


def refuse(folder: Path) -> None:
    """Say that no server will ever listen here, so that nobody tries again."""
    atomic.write_json(folder / _ADDRESS, {})


def is_refused(folder: Path) -> bool:
    return atomic.read_json(folder / _ADDRESS) == {}


def connect(where: dict[str, Any]) -> socket.socket | None:
    """A command's end, or None where nobody listens any more."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with suppress(OSError):
        connection.connect(f"\0{where['name']}")
        if is_same_user(connection):
            return connection
    connection.close()
    return None


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to this one's user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())


def send(
    connection: socket.socket, message: dict[str, Any], files: list[int] | None = None
) -> None:
    data = json.dumps(message).encode()
    header = _LENGTH.pack(len(data))
    if files:
        socket.send_fds(connection, [header], files)
    else:
        connection.sendall(header)
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and the files that came with it; None where the other end is gone."""
    header, files, _, _ = socket.recv_fds(connection, _LENGTH.size, _MOST_FILES)
    if len(header) < _LENGTH.size:
        return None
    (left,) = _LENGTH.unpack(header)
    data = b""
    while len(data) < left:
        piece = connection.recv(left - len(data))
        if not piece:
            return None
        data += piece
    return json.loads(data), list(files)
