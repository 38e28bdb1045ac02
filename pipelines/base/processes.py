"""Processes of this machine: which ones are alive, and how to terminate a process tree."""

import os
import select
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

TERMINATE_GRACE_S = 10.0
POLL_S = 0.02


def start_of(pid: int) -> str:
    """When a process started, to distinguish it from any other that ever has its pid.

    In ticks since boot, with the boot's id, where the system provides them: a time of day would
    change when somebody sets the clock, and a process that starts with the machine may have the
    same pid and tick after the next boot.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return f"{psutil.Process(pid).create_time():.2f}"
    # The name, in parentheses, may contain spaces and parentheses; what follows it does not.
    return f"{boot()} {stat.rpartition(')')[2].split()[19]}"


def boot() -> str:
    """The id of the machine's current boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return str(int(psutil.boot_time()))


def process_lives(pid: int, started: str) -> bool:
    """Whether the process that started at that time still runs; pids are reused."""
    try:
        return lives(psutil.Process(pid)) and start_of(pid) == started
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True)
class ProcessMark:
    """How a file says which process wrote it."""

    pid: int
    started: str
    host: str

    def lives_here(self) -> bool:
        """Whether it is a process of this host, and still runs."""
        return self.host == socket.gethostname() and process_lives(self.pid, self.started)


def this_process() -> ProcessMark:
    me = os.getpid()
    return ProcessMark(me, start_of(me), socket.gethostname())


def is_named_by_a_process(word: str) -> bool:
    """Whether some process of this host has that text in its command line."""
    processes = psutil.process_iter(["cmdline"])
    return any(word in " ".join(process.info["cmdline"] or ()) for process in processes)


def end_processes(
    pids: list[int], grace: float = TERMINATE_GRACE_S, *, with_children: bool = True
) -> None:
    """Terminate these processes and, unless told not to, their children; kill those that remain."""
    processes: set[psutil.Process] = set()
    for pid in pids:
        try:
            process = psutil.Process(pid)
            processes |= {process, *(process.children(recursive=True) if with_children else ())}
        except psutil.NoSuchProcess:
            continue
    for insist in (False, True):
        for process in processes:
            try:
                process.kill() if insist else process.terminate()
            except psutil.NoSuchProcess:
                continue
        deadline = time.monotonic() + grace
        while (processes := set(filter(lives, processes))) and time.monotonic() < deadline:
            time.sleep(POLL_S)


def sleep_beside(pids: Iterable[int], seconds: float) -> None:
    """Sleep so long, but no longer than until one of these processes has ended.

    What follows an end, such as that somebody is told of it, may take a moment: beside one that had
    ended before, it is a short sleep.
    """
    ends: list[int] = []
    try:
        for pid in pids:
            ends.append(os.pidfd_open(pid))
        poll = select.poll()
        for end in ends:
            poll.register(end, select.POLLIN)
        if poll.poll(0):
            time.sleep(min(seconds, POLL_S))
        else:
            poll.poll(seconds * 1000)
    except ProcessLookupError:
        time.sleep(min(seconds, POLL_S))
    except (OSError, AttributeError):  # a system without
        time.sleep(seconds)
    finally:
        for end in ends:
            os.close(end)


def lives(process: psutil.Process) -> bool:
    """A zombie is dead once its last thread is: until then it holds its files and locks."""
    try:
        if not process.is_running():
            return False
        return process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
    except psutil.NoSuchProcess:
        return False
