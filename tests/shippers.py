"""The shippers of throwaway clones, forked from a process that has imported MLflow.

That takes a processor three seconds, and a test session starts a hundred shippers. So whoever would
start one asks a parent here to fork it, by the name of its socket: a driver, itself forked several
times over, holds no connection. What is forked runs the module that `python -m` would, in a session
of its own, with the variables, folder and log that it was to have. The tables of a new database are
copied from one that MLflow made here by its own migrations.
"""

import gc
import importlib
import os
import runpy
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn
from unittest import mock

from pipelines.base import background
from pipelines.tracking.rounds import SETTINGS
from pipelines.warm import wire
from pipelines.warm.title import ROOM, set_title

ROOT = Path(__file__).resolve().parents[1]
_LAST = os.sysconf("SC_OPEN_MAX")
_OF_SHIPPERS = (
    "pipelines.export.registry",
    "pipelines.tracking.store",
    # What MLflow imports late.
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.model_registry.sqlalchemy_store",
    "alembic.command",
    "sqlalchemy.dialects.sqlite",
)


class _Elsewhere:
    """A process that is no child of the one that had it started: there is nothing to wait for."""

    def poll(self) -> int:
        return 0


@contextmanager
def forked_shippers() -> Iterator[None]:
    """Have the shippers that this process starts forked, by a parent that ends with it."""
    listener, name = _listen()
    life, ours = os.pipe()
    words = ["-m", "tests.shippers", str(listener.fileno()), str(life), ROOM]
    parent = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, pass_fds=[listener.fileno(), life]
    )
    listener.close()
    os.close(life)
    with mock.patch.object(background, "start_process", partial(_ask, name)):
        yield
    os.close(ours)
    parent.wait()


def fork_parent() -> int:
    """Have a parent forked for the shippers of this process and of all that it will fork.

    It ends when the file that is returned is closed, or this process ends.
    """
    listener, name = _listen()
    life, ours = os.pipe()
    if not os.fork():
        first, second = sorted((listener.fileno(), life))
        for begin, end in ((3, first), (first + 1, second), (second + 1, _LAST)):
            os.closerange(begin, end)
        serve(listener, life)
    listener.close()
    os.close(life)
    background.start_process = partial(_ask, name)  # type: ignore[assignment]
    return ours


def _listen() -> tuple[socket.socket, str]:
    name = f"\0lockstep-tests-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(name)
    listener.listen(64)
    return listener, name


def _ask(
    name: str, words: list[str], folder: Path, environment: dict[str, str], log: BinaryIO
) -> _Elsewhere:
    message = {"words": words, "folder": str(folder), "environment": environment}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(name)
        wire.send(connection, message, [log.fileno()])
    return _Elsewhere()


def serve(listener: socket.socket, life: int) -> NoReturn:
    """Fork what is asked for, until nobody holds the other end of the pipe."""
    tables = None
    while life not in select.select([listener, life], [], [])[0]:
        connection, _ = listener.accept()
        with connection:
            received = wire.receive(connection) if wire.is_same_user(connection) else None
        if received is None:
            continue
        if tables is None:
            tables = _import_mlflow()
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what is forked here
        message, [log] = received
        if not os.fork():
            _be(message, log, tables)
        os.close(log)
    os._exit(0)


def _import_mlflow() -> bytes:
    """Import all that a shipper does sooner or later; returns an empty database."""
    with mock.patch.dict(os.environ, SETTINGS):
        for name in _OF_SHIPPERS:
            importlib.import_module(name)
        from pipelines.tracking.store import make_tables
    gc.collect()
    gc.freeze()  # what is never collected is never copied
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder, "mlflow.db")
        # Elsewhere: a database that is open must not be carried through a fork.
        if not (pid := os.fork()):
            os.chdir(folder)
            make_tables(database)
            os._exit(0)
        os.waitpid(pid, 0)
        return database.read_bytes()


def _be(message: dict[str, Any], log: int, tables: bytes) -> NoReturn:
    from pipelines.tracking import store
    from pipelines.warm.server import end_quickly

    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, file in ((0, nothing), (1, log), (2, log)):
            os.dup2(file, number)
        os.closerange(3, _LAST)
        os.environ.clear()
        os.environ.update(message["environment"])
        os.chdir(message["folder"])
        _, _, module, *arguments = words = message["words"]
        set_title(words)
        sys.argv = [module, *arguments]
        store.make_tables = lambda path: path.write_bytes(tables)  # type: ignore[assignment]
        # It is imported already, which makes no difference to what it does.
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except BaseException:
        traceback.print_exc()
    end_quickly(status)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
