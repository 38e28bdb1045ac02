"""The process that is ready: it has imported what its children need, and forks one for each.

Always true:
- When it forks it has one thread, has touched no GPU and holds nothing that a child must not have.
- A child is a process of its own, with its own session, files, variables, limits and end.
- It serves one clone and one user, and only while the clone, its code and its lock are there.
- Killed at any moment it takes nothing with it: its children go on, the next command starts anew.
"""

import atexit
import fcntl
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from pipelines.base.errors import LockstepError
from pipelines.base.imports import uncollected
from pipelines.base.redact import RedactedStream
from pipelines.config.strict_yaml import load_yaml
from pipelines.identity.code import code_version
from pipelines.identity.environment import versions
from pipelines.warm import wire
from pipelines.warm.child import Request, become
from pipelines.warm.identity import Kind
from pipelines.warm.title import set_title

HERE = Path(__file__).resolve().parents[2]
IDLE_VARIABLE = "LOCKSTEP_WARM_IDLE_S"
IDLE_S = 900.0
TICK_S, TICK_WITH_CHILDREN_S = 0.5, 0.02
REQUEST_S = 10.0
"""How long a command may take to say what it wants."""
PROBED_S = 0.3
"""How long to try for the lock: a command that looks whether a server lives has it for a moment."""
GRACE_S = 30.0
"""What a child has for its end, once its time is over."""


@dataclass
class Child:
    deadline: float
    waiting: socket.socket | None
    """Who is told how it ended."""
    asked_to_end: bool = False


@dataclass
class Server:
    """Forks until there is a reason to end."""

    folder: Path
    code: Path
    lock: int
    listener: socket.socket
    children: dict[int, Child] = field(default_factory=dict)
    used: float = field(default_factory=time.monotonic)
    ending: str | None = None

    def serve(self) -> tuple[Request, list[int]] | None:
        """None at the server's end. In a forked child: what it has been forked for."""
        idle_s = float(os.environ.get(IDLE_VARIABLE) or IDLE_S)
        with selectors.DefaultSelector() as selector:
            selector.register(self.listener, selectors.EVENT_READ)
            while not self.ending:
                asked_for = any(child.waiting for child in self.children.values())
                ready = selector.select(TICK_WITH_CHILDREN_S if asked_for else TICK_S)
                if ready and (wanted := self._accept()):
                    selector.close()
                    return wanted
                self._reap()
                if self.children:
                    self.used = time.monotonic()
                elif time.monotonic() - self.used > idle_s:
                    self.ending = f"it was idle for {idle_s:g} s"
                if not self._is_current():
                    self.ending = "its clone, or its code, is gone"
        self._finish()
        print(f"ended: {self.ending}", flush=True)
        return None

    def _finish(self) -> None:
        """Nobody finds it any more, and it stays until those are told who wait for a child."""
        self.listener.close()
        os.close(self.lock)
        while any(child.waiting for child in self.children.values()):
            time.sleep(TICK_WITH_CHILDREN_S)
            self._reap()

    def _accept(self) -> tuple[Request, list[int]] | None:
        connection, _ = self.listener.accept()
        connection.settimeout(REQUEST_S)
        try:
            if not wire.is_same_user(connection):
                raise PermissionError("another user's process asked for a child")
            received = wire.receive(connection)
            if received is None or "end" in received[0]:
                self.ending = self.ending or (received and received[0]["end"])
                connection.close()
                return None
            return self._fork(connection, *received)
        except (OSError, ValueError, TypeError, KeyError):
            traceback.print_exc()  # of one request; the command starts a process of its own
            connection.close()
        return None

    def _fork(
        self, connection: socket.socket, message: dict[str, Any], files: list[int]
    ) -> tuple[Request, list[int]] | None:
        waits = message.pop("waits")
        request = Request(**message)
        sys.stdout.flush()
        pid = _fork_a_session()
        if not pid:
            connection.close()
            self.listener.close()
            os.close(self.lock)
            for other in self.children.values():
                if other.waiting:
                    other.waiting.close()
            return request, files
        for file in files:
            os.close(file)
        limit = time.monotonic() + 60.0 * request.minutes if request.minutes else float("inf")
        self.children[pid] = Child(limit, connection if waits else None)
        with suppress(OSError):
            wire.send(connection, {"pid": pid})
        if not waits:
            connection.close()
        return None

    def _reap(self) -> None:
        for pid, child in list(self.children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.children[pid]
                if child.waiting:
                    with suppress(OSError):
                        wire.send(child.waiting, {"status": os.waitstatus_to_exitcode(status)})
                    child.waiting.close()
            elif time.monotonic() > child.deadline:
                # Its whole group: what it has started for itself must not outlive its time.
                os.killpg(pid, signal.SIGKILL if child.asked_to_end else signal.SIGTERM)
                print(f"process {pid}: its time is over", flush=True)
                child.asked_to_end, child.deadline = True, time.monotonic() + GRACE_S

    def _is_current(self) -> bool:
        """Whether its lock is still the one that commands look at, and its code is still there."""
        try:
            same = os.path.samestat((self.folder / wire.LOCK).stat(), os.fstat(self.lock))
            return same and self.code.is_dir()
        except OSError:
            return False


def _fork_a_session() -> int:
    """Fork a process that leads a session of its own by the time that its number is known.

    Whoever is told the number may signal its group at once.
    """
    reading, writing = os.pipe()
    pid = None
    try:
        pid = os.fork()
        if not pid:
            os.setsid()
    finally:
        os.close(writing)
        if pid:
            os.read(reading, 1)  # until the child has closed its end, too
        os.close(reading)
    return pid


def preload(kind: Kind) -> None:
    from stages.contracts.catalog import STAGES

    if kind is Kind.CONTROL:
        names = list(_OF_CONTROL)
        for stage in STAGES.values():
            code_version(HERE, stage.module)  # what each file holds is remembered
    else:
        from stages.engines.processes import determinism

        determinism.before_import()
        names = [
            "pipelines.worker.worker",
            *(stage.module for stage in STAGES.values()),
            *_OF_COMPUTE,
        ]
    with uncollected():
        for name in dict.fromkeys(names):
            try:
                importlib.import_module(name)
            except Exception:
                traceback.print_exc()  # whoever needs it meets the same error, and says it better
    if kind is Kind.CONTROL:
        from dvc.cli.parser import get_main_parser

        from pipelines.config.profiles import Profile
        from stages.contracts.base import Section
        from stages.contracts.params import Params

        models: list[type[Section]] = [
            Params,
            Profile,
            *(stage.config for stage in STAGES.values()),
        ]
        for model in models:
            model.model_rebuild()
        get_main_parser()  # DVC keeps it
    else:
        versions()


def read_settings(clone: Path) -> None:
    """Parse what each DVC and driver will: one that finds the same text need not do it again."""
    from dvc.utils.serialize import ParseError

    from pipelines.warm.dvc_yaml import parse

    for path in (clone / "params.yaml", *clone.glob("slurm_profiles/*.yaml")):
        with suppress(LockstepError, OSError):
            load_yaml(path)
    for path in (clone / "params.yaml", clone / "dvc.yaml"):
        with suppress(ParseError, OSError, UnicodeDecodeError):
            parse(path.read_text(encoding="utf-8"), path)


_OF_CONTROL = (
    "pipelines.commands.cli",
    "pipelines.commands.stage",
    "pipelines.driver.stage",
    "pipelines.warm.dvc",
    "pipelines.warm.stage",
    # What DVC imports late, in the order of a `dvc repro`.
    "dvc.cli.parser",
    "dvc.repo",
    "dvc.repo.artifacts",
    "dvc.repo.datasets",
    "dvc.repo.metrics",
    "dvc.repo.params",
    "dvc.repo.plots",
    "dvc.repo.stage",
    "dvc.repo.open_repo",
    "dvc.cachemgr",
    "dvc.data_cloud",
    "dvc.lock",
    "dvc.rwlock",
    "dvc.scm",
    "dvc.dirs",
    "configobj",
    "dvc_data.hashfile.db.local",
    "dvc_data.hashfile.status",
    "dulwich.ignore",
    "dulwich.index",
    "fsspec.implementations.memory",
    "dvc.utils.strictyaml",
    "pyparsing",
    "ruamel.yaml.mergevalue",
)
_OF_COMPUTE = (
    "transformers.models.llama.modeling_llama",
    "stages.engines.models.usual",
    # pyarrow looks for it when it makes its first table of rows.
    "pandas",
    # torch sums up what it has compiled with it, at the end of each process.
    "tabulate",
)
"""What stages import, or work out, only once they know their model or their rows."""


def end_quickly(status: int) -> NoReturn:
    """End this process as an interpreter does, but for taking all modules down one by one.

    In a forked process that takes half a second: each object is written to, and so its page copied.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as at any exit
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _worker(arguments: list[str], files: list[int]) -> int:  # noqa: ARG001
    from pipelines.worker.worker import run_attempt

    run_attempt(arguments[0])
    return 0


def _dvc(arguments: list[str], files: list[int]) -> int:  # noqa: ARG001
    from pipelines.warm.dvc import run_dvc

    return run_dvc(arguments)


def _stage(arguments: list[str], files: list[int]) -> int:
    from pipelines.warm.stage import drive

    return drive(arguments, files[-1])


_MODULES: dict[str, Callable[[list[str], list[int]], int]] = {
    "pipelines.worker.worker": _worker,
    "dvc": _dvc,
    "pipelines": _stage,
}


def threads_at_a_fork() -> list[str]:
    """The names of all threads but this one that are still there when a process is forked.

    Some libraries know of forks: OpenBLAS ends its threads before one, and jemalloc's may stay.
    """
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return [thread.name for thread in threading.enumerate()[1:]]
    others = [task / "comm" for task in tasks.iterdir() if int(task.name) != os.getpid()]
    names = []
    for path in others:
        with suppress(OSError):  # a thread that has ended since
            names.append(path.read_text(encoding="utf-8").strip())
    return [name for name in names if name not in _KNOW_OF_FORKS]


_KNOW_OF_FORKS = ("jemalloc_bg_thd",)


def take_lock(folder: Path) -> int | None:
    """The lock that says that a server lives here; None where another one does."""
    lock = os.open(folder / wire.LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + PROBED_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(lock)
                return None
        time.sleep(0.01)


def main(folder: Path, kind: Kind) -> int:
    """The server's life; and, in each of its children, the child's."""
    lock = take_lock(folder)
    if lock is None:
        return 0
    wire.forget(folder)
    wire.note_process(folder, os.getpid())
    set_title([*sys.orig_argv[:-1]])
    began = time.monotonic()
    plain = sys.stdout, sys.stderr
    # A module may print what it likes while it is imported, into a log that nobody else redacts.
    sys.stdout, sys.stderr = map(RedactedStream, plain)  # type: ignore[assignment]
    preload(kind)
    if kind is Kind.CONTROL:
        read_settings(Path.cwd())
    # Python warns of any thread; which ones there are is looked at here.
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", append=False)
    if threads := threads_at_a_fork():
        print(f"no process can be forked beside the threads {', '.join(threads)}", flush=True)
        wire.refuse(folder)
        return 1
    print(f"ready after {time.monotonic() - began:.1f} s", flush=True)
    gc.freeze()
    wanted = Server(folder, HERE, lock, wire.listen(folder, lock)).serve()
    if wanted is None:
        return 0
    request, files = wanted
    sys.stdout, sys.stderr = plain
    become(request, files)
    end_quickly(_MODULES[request.module](request.arguments, files))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Kind(sys.argv[2])))
