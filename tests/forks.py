"""Commands and servers of throwaway clones, forked from processes that have imported everything.

A test session runs hundreds of clones and thousands of commands, and nearly all of them import the
same: DVC and our own code, or torch and transformers. So each test process has a parent for either
plane. A command is forked from it instead of being started, and so is the server that a clone's
stages are forked from. Both are processes of their own, with their own session, folder, variables
and exit, and run the very code that they would import. What needs a fresh interpreter gets one: a
command whose variables Python or its libraries read at their start, and a server with other code.

`dvc` is forked as `lockstep run` has it forked, with the driver of a stage in a fork of that. DVC
as its users start it, a fresh process with drivers in a shell, is what `Clone.start` starts.
"""

import atexit
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn

from pipelines.base.repository import Repository
from pipelines.config.profiles import Resources, thread_variables
from pipelines.identity.snapshot import take_snapshot
from pipelines.warm import wire
from pipelines.warm.identity import Identity, Kind
from tests import shippers

ROOT = Path(__file__).resolve().parents[1]
_AT_THE_START = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_")
"""Begin the names of variables that an interpreter reads when it starts, and never again."""
_OF_COMMANDS = (
    "networkx",
    "pipelines.runs.run",
    "pipelines.runs.record",
    "pipelines.runs.status",
    "pipelines.results.samples",
    "pipelines.results.verify",
    "pipelines.lineage.answer",
)
MODULE = ("python", "-m", "pipelines")
"""Begins the command that takes its code from the clone it is called in."""
_parents: dict[Kind, socket.socket] = {}


class Forked:
    """A command that was forked, with what a test asks of a `subprocess.Popen`.

    It leads a session of its own, and its number is known by then.
    """

    def __init__(self, output: int, channel: socket.socket) -> None:
        self.stdout = os.fdopen(output, encoding="utf-8", errors="replace")
        self.returncode: int | None = None
        self._channel = channel
        self.pid: int = self._answer()["pid"]

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._channel], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._channel], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.returncode = self._answer()["status"]
            self._channel.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """All that it prints, and its end; killed where that takes longer."""
        limit = threading.Timer(timeout or threading.TIMEOUT_MAX, self.kill)
        limit.daemon = True
        limit.start()
        with self.stdout:
            text = self.stdout.read()
        limit.cancel()
        self.wait()
        return text, None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _answer(self) -> dict[str, Any]:
        answer = wire.receive(self._channel)
        assert answer is not None, "nobody knows how the command ended"
        return answer[0]


def fork_command(
    words: tuple[str, ...], folder: Path, environment: dict[str, str]
) -> Forked | None:
    """Start a command; None where it needs an interpreter of its own."""
    is_ours = words[0] in ("lockstep", "dvc") or words[:3] == MODULE
    if not (is_ours and _are_our_settings(environment)):
        return None
    reading, writing = os.pipe()
    mine, theirs = socket.socketpair()
    with Path(os.devnull).open("rb") as nothing:
        files = [nothing.fileno(), writing, theirs.fileno()]
        message = {"words": list(words), "folder": str(folder), "environment": environment}
        _ask(Kind.CONTROL, message, files)
    os.close(writing)
    theirs.close()
    return Forked(reading, mine)


def run_forked(
    words: tuple[str, ...], folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str] | None:
    """Run a command to its end; None where it needs an interpreter of its own."""
    command = fork_command(words, folder, environment)
    if command is None:
        return None
    text, _ = command.communicate()
    return subprocess.CompletedProcess(words, command.wait(), text)


def fork_servers(root: Path, environment: dict[str, str], resources: Resources | None) -> None:
    """Have the servers of a clone forked; where they do not fit a command, it starts its own.

    `resources` are those of its stages, where these run on this machine.
    """
    if not _are_our_settings(environment):
        return
    code = take_snapshot(Repository(root))
    ours = {"PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"}
    needed = {Kind.CONTROL: environment}
    if resources:
        needed[Kind.COMPUTE] = {**environment, **thread_variables(resources), **ours}
    for kind, variables in needed.items():
        identity = Identity(kind, (sys.executable,), code, variables)
        server = root / ".lockstep/warm" / identity.name
        server.mkdir(parents=True, exist_ok=True)
        server.parent.chmod(0o700)
        with (server / "log").open("ab") as log:
            message = {"server": str(server), "code": str(code), "folder": str(root)}
            _ask(kind, {**message, "environment": variables | ours}, [log.fileno()])


def _are_our_settings(environment: dict[str, str]) -> bool:
    """Whether an interpreter with these variables would start as this one has."""

    def read_at_start(variables: dict[str, str]) -> dict[str, str]:
        kept = {name: text for name, text in variables.items() if name.startswith(_AT_THE_START)}
        kept.pop("PYTHONDONTWRITEBYTECODE", None)
        return kept

    return read_at_start(environment) == read_at_start(dict(os.environ))


def _ask(kind: Kind, message: dict[str, Any], files: list[int]) -> None:
    wire.send(_parent(kind), message, files)
    assert wire.receive(_parent(kind)) is not None, "the parent of the tests' processes is gone"


def _parent(kind: Kind) -> socket.socket:
    """This process's parent of that kind, started at the first need; it ends with this process."""
    if kind not in _parents:
        _parents[kind], other = socket.socketpair()
        words = [sys.executable, "-m", "tests.forks", str(other.fileno()), kind, "-" * 2000]
        one_thread = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        environment = {**os.environ, **dict.fromkeys(one_thread, "1"), "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(words, env=environment, cwd=ROOT, pass_fds=[other.fileno()])
        atexit.register(process.kill)
        other.close()
    return _parents[kind]


def _serve(channel: socket.socket, kind: Kind) -> int:
    from pipelines.warm import server

    server.preload(kind)
    if kind is Kind.CONTROL:
        for name in _OF_COMMANDS:
            importlib.import_module(name)
        shippers.fork_parent()
    our_code = _version()
    # What is never collected is never copied: a fork costs what it changes.
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what is forked here
    while (received := wire.receive(channel)) is not None:
        message, files = received
        if not os.fork():
            channel.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            if "server" in message:
                code = Path(message["code"])
                same = code.name == our_code or (kind is Kind.CONTROL and _drives_as_here(code))
                server.end_quickly(_be_server(message, files[0], kind, same_code=same))
            _wait_for_command(message, files)
        for file in files:
            os.close(file)
        wire.send(channel, {})
    return 0


def _version() -> str:
    """The name of the copy that a clone would take of the code that is imported here."""
    import hashlib

    from pipelines.identity.snapshot import _sources

    digest = hashlib.sha256()
    for name, data in _sources(ROOT).items():
        digest.update(f"{name} {len(data)}\n".encode() + data)
    return digest.hexdigest()[:16]


def _wait_for_command(message: dict[str, Any], files: list[int]) -> NoReturn:
    """Between the parent and the command: somebody has to say how it ended."""
    pid = os.fork()
    if not pid:
        os._exit(_be_command(message, files))
    for file in files[:2]:
        os.close(file)
    _, status = os.waitpid(pid, 0)
    with socket.socket(fileno=files[2]) as caller:
        wire.send(caller, {"status": os.waitstatus_to_exitcode(status)})
    os._exit(0)


def _be_command(message: dict[str, Any], files: list[int]) -> int:
    from pipelines.warm.title import set_title

    words = message["words"]
    status = 1
    try:
        os.setsid()
        with socket.socket(fileno=files[2]) as caller:
            wire.send(caller, {"pid": os.getpid()})
        for number, file in ((0, files[0]), (1, files[1]), (2, files[1])):
            os.dup2(file, number)
        _settle(message)
        program = str(Path(sys.executable).with_name(words[0]))
        module = tuple(words[:3]) == MODULE
        its_code = _drives_as_here(Path(message["folder"]))
        if module and not its_code:
            os.execv(program, words)
        set_title([program, *words[1:]] if module else [sys.executable, program, *words[1:]])
        sys.argv = words[2:] if module else [program, *words[1:]]
        if module:
            main = _run_module
        elif words[0] == "dvc" and its_code:
            from pipelines.warm.dvc import run_dvc as main
        elif words[0] == "dvc":
            from dvc.cli import main
        else:
            from pipelines.commands.cli import main
        status = int(main(words[1:]) or 0)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _run_module(words: list[str]) -> None:
    """As `python -m` does."""
    runpy.run_module(words[1], run_name="__main__")


def _drives_as_here(clone: Path) -> bool:
    """Whether a driver that is forked from DVC has imported the very code of the clone."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("pipelines", "stages") and module.__file__:
            source = Path(module.__file__)
            theirs = clone / source.relative_to(ROOT)
            if not theirs.is_file() or theirs.read_bytes() != source.read_bytes():
                return False
    return True


def _be_server(message: dict[str, Any], log: int, kind: Kind, *, same_code: bool) -> int:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in ((0, nothing), (1, log), (2, log)):
        os.dup2(file, number)
    _settle(message)
    if not same_code:
        for name in [name for name in sys.modules if name.split(".")[0] in ("pipelines", "stages")]:
            del sys.modules[name]
        sys.path[:] = [message["code"], *(path for path in sys.path if path not in ("", str(ROOT)))]
    words = ["-m", "pipelines.warm.server", message["server"], str(kind)]
    sys.orig_argv[:] = [sys.executable, *words, ""]
    from pipelines.warm import server
    from pipelines.warm.identity import Kind as TheirKind

    server.HERE = Path(message["code"])
    if same_code and kind is Kind.COMPUTE:
        # Imported from here; to the letter what lies there.
        from pipelines.worker import worker

        worker.CODE = server.HERE.resolve()
    return server.main(Path(message["server"]), TheirKind(str(kind)))


def _settle(message: dict[str, Any]) -> None:
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(message["environment"])
    os.chdir(message["folder"])


if __name__ == "__main__":
    sys.exit(_serve(socket.socket(fileno=int(sys.argv[1])), Kind(sys.argv[2])))
