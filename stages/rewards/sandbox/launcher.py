"""The way into the sandbox: `python -m stages.rewards.sandbox.launcher CONTROL REPORT`.

A fresh process of one thread, which is what the kernel asks of those who enter a user namespace. It
reads the task from CONTROL, enters namespaces of its own and forks the supervisor, which is the
first process in there. It has the program's standard streams, to hand them on.

Root makes the namespaces as root and the program then gets an unused uid; an ordinary user (and a
root that has no uids to give) makes them inside a user namespace in which it is nobody.
"""

from __future__ import annotations

# Each program pays for what is imported here: no pathlib, no typing, no dataclasses.
import contextlib
import marshal
import os
import sys
from types import SimpleNamespace

from stages.rewards.sandbox import linux, root
from stages.rewards.sandbox.status import Kind
from stages.rewards.sandbox.supervisor import Channels, supervise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from stages.rewards.sandbox.values import Limits

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


def main() -> None:
    channels = Channels(*(int(word) for word in sys.argv[1:3]))
    try:
        _keep_descriptors_from_the_program()
        task = _read_task(channels.control)
        limits: Any = SimpleNamespace(**task["limits"])
        files = task["files"]
        # Should the machine run out of memory, this goes before the training does.
        _write("/proc/self/oom_score_adj", "1000")
        kind = Kind(task["kind"])
        if kind is Kind.NAMESPACES:
            _in_namespaces(limits, files, channels)
        else:
            # Bubblewrap has done the rest; or nobody has.
            root.write_files(files)
            proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
            supervise(limits, channels, proc, uid=None, own=kind is Kind.BUBBLEWRAP)
    except Exception as error:
        channels.say("failed", repr(error))
    os._exit(0)


def packed(task: dict[str, Any]) -> bytes:
    """A task as it goes through the control pipe, which stays open after it."""
    content = marshal.dumps(task)
    return len(content).to_bytes(8, "big") + content


def _keep_descriptors_from_the_program() -> None:
    for name in os.listdir("/proc/self/fd"):
        # One of them was the listing itself, and is closed by now.
        with contextlib.suppress(OSError):
            if int(name) > 2:
                os.set_inheritable(int(name), False)


def _read_task(control: int) -> dict[str, Any]:
    task: dict[str, Any] = marshal.loads(_read(control, int.from_bytes(_read(control, 8), "big")))
    return task


def _read(control: int, length: int) -> bytes:
    content = b""
    while len(content) < length:
        part = os.read(control, length - len(content))
        if not part:
            # The caller is gone.
            os._exit(0)
        content += part
    return content


def _in_namespaces(limits: Limits, files: dict[str, bytes], channels: Channels) -> None:
    uid = _enter_namespaces()
    supervisor = os.fork()
    if supervisor:
        for stream in (0, 1, 2, channels.control, channels.report):
            os.close(stream)
        os.waitpid(supervisor, 0)
        os._exit(0)
    linux.die_with_parent()
    linux.set_host_name("sandbox")
    proc = root.enter(files, limits.file_mb, NOBODY if uid is None else uid)
    supervise(limits, channels, proc, uid, own=True)


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
        _write(f"/proc/self/{name}", line)
    return None


def _may_become(uid: int) -> bool:
    """Whether this user namespace knows the uid."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        ranges = [[int(word) for word in line.split()] for line in file]
    return any(first <= uid < first + length for first, _, length in ranges)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


if __name__ == "__main__":
    main()
