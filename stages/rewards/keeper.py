"""The process above one that runs code we did not write: with that one, it ends all it has started.

A daemon has left its group, its session and its parent, so that whoever ends those does not reach
it. Linux gives such orphans to the nearest process above that asks for them: this one asks.

Always true: once the kept process has ended, whatever ended it, or the keeper is told to end (TERM)
or has lost its own parent, all that is below the keeper is killed; then it ends as the kept process
did. What is left where the keeper itself was killed is known by a mark in its environment.
"""

import ctypes
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from stages.rewards.sandbox.linux import reap

MARK_VARIABLE = "LOCKSTEP_KEPT"
END_SECONDS = 10.0
"""How long it may take to end all; what waits for a disk that does not answer cannot be killed."""
_LOOK_INTERVAL_S = 1.0
_POLL_S = 0.01
_PR_SET_CHILD_SUBREAPER = 36


def keep() -> None:
    """Returns in a forked process, which is kept; this one stays above it and never returns."""
    parent = os.getppid()
    if hasattr(libc := ctypes.CDLL(None), "prctl"):
        libc.prctl(_PR_SET_CHILD_SUBREAPER, *map(ctypes.c_ulong, (1, 0, 0, 0)))
    awaited = {signal.SIGCHLD, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    kept = os.fork()
    if not kept:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    # Its pipes are its own: their other ends hear when it has ended.
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    status = None
    while status is None and os.getppid() == parent:
        heard = signal.sigtimedwait(awaited, _LOOK_INTERVAL_S)
        status = reap(kept)
        if heard and heard.si_signo == signal.SIGTERM:
            break
    _end_as(_end_all(kept, status))


def end_marked(mark: str) -> None:
    """Kill every process that has this value of the variable from its parents."""
    entry = f"{MARK_VARIABLE}={mark}".encode()
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        pids = [pid for pid in _pids() if entry in _environment(pid)]
        if not pids:
            return
        _kill(pids)
        time.sleep(_POLL_S)


def _end_all(kept: int, status: int | None) -> int:
    """Kill all that is below, again and again: what was just about to fork, too."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(kept, signal.SIGKILL)
    deadline = time.monotonic() + END_SECONDS
    while _has_children() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        ended = reap(kept)
        status = ended if ended is not None else status
        if _has_children():
            _kill(_below(os.getpid()))
    return signal.SIGKILL if status is None else status


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _below(top: int) -> list[int]:
    """All processes below one, from /proc; none where there is no such thing."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        with suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            # The name, in brackets, may hold blanks and brackets itself; what follows it does not.
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(pid)
    descendants, left = [], [top]
    while left:
        left = [child for pid in left for child in children.get(pid, ())]
        descendants += left
    return descendants


def _pids() -> Iterator[int]:
    with suppress(OSError):
        yield from (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []  # another user's, or gone


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _end_as(status: int) -> None:
    """End this process with that status, but for the picture of its memory."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 1)
