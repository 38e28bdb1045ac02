"""The way into the sandbox, for one program after the other.

`main` waits, with all that a program may want already imported, and forks a child for each sandbox
that it is asked for. The child has one thread, which is what the kernel asks of those who enter a
user namespace. It reads its task, enters namespaces of its own and forks the supervisor, the first
process in there, which forks the program. The one who waits never reads a task: what its children
find in their memory is no other program's, and no test's.

Root makes the namespaces as root and the program then gets an unused uid; an ordinary user (and a
root that has no uids to give) makes them inside a user namespace in which it is nobody.
"""

from __future__ import annotations

import builtins
import gc
import marshal
import os
import socket
import sys
from pathlib import Path
from types import ModuleType

from stages.rewards.sandbox import linux, root
from stages.rewards.sandbox.candidate import be_candidate
from stages.rewards.sandbox.interpreter import be_interpreter
from stages.rewards.sandbox.judge import be_judge
from stages.rewards.sandbox.seccomp import filter_here
from stages.rewards.sandbox.supervisor import Channels, supervise
from stages.rewards.sandbox.values import IsolationKind, Limits, SandboxRole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAIN = "main.py"
READY = b"r"
NOBODY = 65534
_FIRST_UID = 0x40000000
"""Root gives every sandbox a uid of its own from here on, and so its own count of processes."""
_NAMESPACES = (
    linux.CLONE_NEWNS
    | linux.CLONE_NEWPID
    | linux.CLONE_NEWNET
    | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUTS
    | linux.CLONE_NEWCGROUP
)


_ROLES: dict[SandboxRole, Callable[..., None]] = {
    SandboxRole.CANDIDATE: be_candidate,
    SandboxRole.JUDGE: be_judge,
    SandboxRole.INTERPRETER: be_interpreter,
}


def main(end: int) -> None:
    """Fork a child for each message on the socket, which brings its descriptors."""
    import asyncio  # noqa: F401
    import unittest  # noqa: F401

    # What is found out here is known in every child.
    root.package_folders()
    filter_here()
    asked = socket.socket(fileno=end)
    gc.freeze()
    asked.send(READY)
    while True:
        message, given, _, _ = socket.recv_fds(asked, 1, 5)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            break
        for descriptor in given:
            os.close(descriptor)
        linux.reap()
    asked.close()
    control, report, *streams = given
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    once(control, report)


def once(control: int, report: int) -> None:
    """Make the sandbox whose task comes through `control`. In the program's process it returns
    when the program has run, so that Python ends there as it always does.
    """
    channels = Channels(control, report)
    try:
        task = _read_task(channels.control)
        limits = Limits(**task["limits"])
        # Should the machine run out of memory, this goes before the training does.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
        kind, role = IsolationKind(task["kind"]), SandboxRole(task["role"])
        if kind is IsolationKind.NAMESPACES:
            is_program = _in_namespaces(limits, task["files"], channels)
        else:
            # Bubblewrap has done the rest; or nobody has.
            root.write_files(task["files"])
            proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
            own = kind is IsolationKind.BUBBLEWRAP
            is_program = supervise(limits, channels, proc, uid=None, own=own)
    except Exception as error:
        channels.say("failed", repr(error))
        os._exit(0)
    if not is_program:
        os._exit(0)
    # Of bubblewrap's.
    os.environ.pop("PWD", None)
    sys.path[:] = [path for path in sys.path if path.startswith(sys.base_prefix)]
    if role is SandboxRole.PROGRAM:
        return _run_main(**task["given"])
    try:
        _ROLES[role](**task["given"])
    finally:
        # Threads and exit handlers have no say any more.
        os._exit(0)


def _run_main(source: bytes) -> None:
    """As python runs a script."""
    import _sitebuiltins

    main = ModuleType("__main__")
    main.__dict__.update(__file__=MAIN, __builtins__=builtins)
    sys.modules["__main__"] = main
    sys.argv = [MAIN]
    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D"))
    exec(compile(source, MAIN, "exec", dont_inherit=True), main.__dict__)


def _read_task(control: int) -> dict[str, Any]:
    """All that the control pipe brings; it stays open after that."""
    try:
        with open(control, "rb", closefd=False) as pipe:
            task: dict[str, Any] = marshal.load(pipe)
            return task
    except EOFError:
        # The caller is gone.
        os._exit(0)


def _in_namespaces(limits: Limits, files: dict[str, bytes], channels: Channels) -> bool:
    uid = _enter_namespaces()
    supervisor = os.fork()
    if supervisor:
        for stream in (0, 1, 2, channels.control):
            os.close(stream)
        # The report is closed when everything in there is gone, and not before.
        os.waitpid(supervisor, 0)
        os._exit(0)
    linux.die_with_parent()
    linux.set_host_name("sandbox")
    proc = root.enter(files, limits.file_mb, NOBODY if uid is None else uid)
    return supervise(limits, channels, proc, uid, own=True)


def _enter_namespaces() -> int | None:
    """Returns the uid that the program gets, None where it has it already."""
    uid, gid = os.geteuid(), os.getegid()
    given = _FIRST_UID + os.getpid()
    if uid == 0 and _may_become(given):
        linux.unshare(_NAMESPACES)
        return given
    linux.unshare(linux.CLONE_NEWUSER | _NAMESPACES)
    for name, line in (
        ("setgroups", "deny"),
        ("uid_map", f"{NOBODY} {uid} 1"),
        ("gid_map", f"{NOBODY} {gid} 1"),
    ):
        Path("/proc/self", name).write_text(line, encoding="ascii")
    return None


def _may_become(uid: int) -> bool:
    """Whether this user namespace knows the uid."""
    lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
    ranges = [[int(word) for word in line.split()] for line in lines]
    return any(first <= uid < first + length for first, _, length in ranges)
