"""The first process of a sandbox: it starts the program, watches it, and takes everything with it.

As process 1 of a PID namespace it cannot be killed from inside, and when it ends the kernel kills
every process of the namespace, daemons included. Nothing of the program's reaches it but numbers in
/proc. What became of the program goes out through a descriptor that the program never had.
"""

from __future__ import annotations

import math
import os
import resource
import select
import signal
import time
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass

from stages.rewards.sandbox import linux
from stages.rewards.sandbox.seccomp import filter_here
from stages.rewards.sandbox.values import Limits, Status

BEGIN, REST = b"b", b"r"
"""What a session's caller says through the control pipe: an execution begins, or has ended."""
_TICK_S = 0.02
_RESTING_TICK_S = 0.5
"""Many sessions rest at a time, and to watch each costs something."""
_MOST_EXECUTIONS = 1000
"""Each up to the limit of CPU time, that one process of a session may go through."""
_MOST_FILES = 4096
_MOST_DESCRIPTORS = 64
_MB = 1 << 20
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Channels:
    """The descriptors that lead out; the program gets neither."""

    control: int
    """Closed by the caller when the program must end; also when the caller dies. A session's
    caller says here when an execution begins and ends."""
    report: int
    """Takes one line: how the program ended, or why the sandbox failed."""

    def say(self, status: str, detail: object = "") -> None:
        os.write(self.report, " ".join(f"{status} {detail}".splitlines()).encode() + b"\n")


def supervise(limits: Limits, channels: Channels, proc: int, uid: int | None, own: bool) -> bool:
    """Fork the program's process, and watch it to its end, or to that of the limits.

    Returns True in the program's process, which has no way back, and False when all is over. `proc`
    is an open /proc; `uid` is whom the program runs as, None for whoever this is. `own` says that
    all processes in `proc` are the program's but this one.
    """
    # Process 1 ignores what it does not handle, and Python would handle this one.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    linux.hide_from_debuggers()
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    # Opened while it may be: without capabilities, the program's folder is closed to this process.
    home = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    deadline = time.monotonic() + limits.wall_s
    child = os.fork()
    if child == 0:
        _become_the_program(limits, channels, uid, own)
        return True
    for stream in range(3):
        os.close(stream)
    if own:
        linux.drop_capabilities()
    # A session begins at rest.
    tick = _TICK_S if math.isfinite(limits.wall_s) else _RESTING_TICK_S
    spent_before = 0.0
    waiting = select.poll()
    for end in (channels.control, woken):
        waiting.register(end, select.POLLIN)
    while True:
        ready = {end for end, _ in waiting.poll(tick * 1000)}
        told = os.read(channels.control, 4096) if channels.control in ready else None
        if told == b"":
            break
        if woken in ready:
            os.read(woken, 4096)
        # Orphans of the program's are children of this process, too.
        ended = linux.reap(child)
        used = _usage(proc, None if own else child)
        if told:
            tick = _RESTING_TICK_S if told.endswith(REST) else _TICK_S
            # What runs on while a session rests is on the account of the execution before.
            spent_before = used.cpu_s if BEGIN in told else spent_before
        used = used._replace(cpu_s=used.cpu_s - spent_before)
        if ended is not None:
            channels.say(*_how_it_ended(ended, used, limits))
            break
        if over := _over(used, limits):
            channels.say(over)
            break
        if own and _files(home) > _MOST_FILES:
            channels.say(Status.MEMORY)
            break
        if time.monotonic() > deadline:
            channels.say(Status.TIMEOUT)
            break
    if not own:
        _kill_session(proc, child)
    return False


def _become_the_program(limits: Limits, channels: Channels, uid: int | None, own: bool) -> None:
    """After this nothing that runs in this process is trusted."""
    try:
        os.setsid()
        os.umask(0o077)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        _set_limits(limits)
        if uid is not None:
            _limit(resource.RLIMIT_NPROC, limits.processes)
        elif own and _counts_by_namespace():
            # The launcher and the supervisor count too.
            _limit(resource.RLIMIT_NPROC, limits.processes + 2)
        linux.no_new_privileges()
        linux.drop_capabilities()
        linux.filter_system_calls(filter_here())
    except BaseException as error:
        channels.say("failed", f"could not start the program: {error!r}")
        os._exit(1)
    # The caller's numbers may be high; all others were opened here, one after the other.
    for end in (channels.control, channels.report):
        os.close(end)
    os.closerange(3, _MOST_DESCRIPTORS)


def _set_limits(limits: Limits) -> None:
    # A session, which has no end of its own, may use as much in each of its executions.
    executions = 1 if math.isfinite(limits.wall_s) else _MOST_EXECUTIONS
    wanted = {
        resource.RLIMIT_AS: limits.memory_mb * _MB,
        resource.RLIMIT_CPU: (math.ceil(limits.cpu_s) + 1) * executions,
        resource.RLIMIT_FSIZE: limits.file_mb * _MB,
        resource.RLIMIT_NOFILE: _MOST_DESCRIPTORS,
        resource.RLIMIT_STACK: 8 * _MB,
        # Too little for a file; and a handler of the host's, whom 0 does not stop, is not called.
        resource.RLIMIT_CORE: 1,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,
    }
    for what, value in wanted.items():
        _limit(what, value)


def _limit(what: int, value: int) -> None:
    _, hard = resource.getrlimit(what)
    most = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (most, most))


def _counts_by_namespace() -> bool:
    """Whether RLIMIT_NPROC counts within a user namespace.

    Older kernels count all of the user's processes; there only the supervisor counts.
    """
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int(minor.partition("-")[0])) >= (5, 14)


_Usage = namedtuple("_Usage", ("processes", "cpu_s", "memory"))
"""What all processes of the program use together."""


def _over(used: _Usage, limits: Limits) -> Status | None:
    if used.cpu_s > limits.cpu_s:
        return Status.CPU
    if used.memory > limits.memory_mb * _MB:
        return Status.MEMORY
    return Status.PROCESSES if used.processes > limits.processes else None


def _usage(proc: int, session: int | None) -> _Usage:
    """Of those alive and those buried. Pages that two processes share count twice."""
    buried = resource.getrusage(resource.RUSAGE_CHILDREN)
    processes, cpu, memory = 0, buried.ru_utime + buried.ru_stime, 0
    for fields, swapped in _stats(proc, session):
        # Fields 14 to 17 of proc(5): its own time and that of its buried children; 20: threads.
        cpu += sum(int(field) for field in fields[11:15]) / _TICKS_PER_S
        processes += int(fields[17])
        memory += int(fields[21]) * _PAGE + swapped
    return _Usage(processes, cpu, memory)


def _files(home: int) -> int:
    """How many there are in /tmp. Even empty ones take memory, and bubblewrap sets no limit."""
    folder = os.fstatvfs(home)
    return folder.f_files - folder.f_ffree


def _stats(proc: int, session: int | None) -> Iterator[tuple[list[str], int]]:
    """For each process: the fields of /proc/PID/stat after the name, which may hold anything, and
    how many bytes of it lie in swap.
    """
    for name in os.listdir(proc):
        if not name.isdigit() or (session is None and name == "1"):
            continue
        try:
            fields = _read(f"{name}/stat", proc).rpartition(")")[2].split()
            if session is None or int(fields[3]) == session:
                yield fields, _swapped(_read(f"{name}/status", proc))
        except OSError:
            # It has just ended.
            continue


def _read(path: str, folder: int) -> str:
    file = os.open(path, os.O_RDONLY, dir_fd=folder)
    try:
        return os.read(file, 4096).decode("utf-8", "replace")
    finally:
        os.close(file)


def _swapped(status: str) -> int:
    """No such line is there of a process that ends; its name, before it, has no newline."""
    _, has_swap, rest = status.partition("\nVmSwap:")
    return int(rest.split()[0]) * 1024 if has_swap else 0


def _how_it_ended(status: int, used: _Usage, limits: Limits) -> tuple[Status, object]:
    if os.WIFEXITED(status):
        return Status.FINISHED, os.WEXITSTATUS(status)
    number = os.WTERMSIG(status)
    if number in (signal.SIGXCPU, signal.SIGKILL) and used.cpu_s >= limits.cpu_s:
        return Status.CPU, ""
    return (Status.KILLED if number == signal.SIGKILL else Status.CRASHED), ""


def _kill_session(proc: int, session: int) -> None:
    """Without a namespace: whatever did not leave the program's session."""
    for _ in range(100):
        try:
            os.killpg(session, signal.SIGKILL)
        except ProcessLookupError:
            return
        linux.reap()
        if not any(True for _ in _stats(proc, session)):
            return
        time.sleep(0.01)
