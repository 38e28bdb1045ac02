"""Logs that anybody may be shown: without secrets, and closed to all but their owner and group.

Redaction is at the file descriptors: what a library in C, a helper process or a reward function
writes is in no log before it has passed through it.
"""

import ctypes
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from pipelines.base.redacting_process import ERR, OUT

LOG_MODE = 0o640
_CODE = Path(__file__).resolve().parents[2]


def open_log(path: Path) -> BinaryIO:
    """A log to append to."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, LOG_MODE), "ab")


def close_to_others() -> None:
    """Where this process writes to files that a launcher has opened: nobody else may read them."""
    for log in (OUT, ERR):
        with suppress(OSError):  # somebody else's file
            mode = os.fstat(log).st_mode
            if stat.S_ISREG(mode):
                os.fchmod(log, stat.S_IMODE(mode) & LOG_MODE)


@contextmanager
def redacted_log() -> Iterator[None]:
    """What this process and its children write in here is redacted; it is in the log at the end."""
    close_to_others()
    channel, theirs = socket.socketpair()
    pipes = {number: os.pipe() for number in (OUT, ERR)}
    with theirs:
        process = _start(theirs, [reading for reading, _ in pipes.values()])
    try:
        with output_put_back():
            for number, (reading, writing) in pipes.items():
                os.close(reading)
                os.dup2(writing, number)
                os.close(writing)
            yield
    finally:
        with channel, suppress(OSError):
            # Whoever hears how the stage ended finds all that it wrote in its log.
            channel.sendall(b".")
            channel.recv(1)
        process.wait()


@contextmanager
def output_put_back() -> Iterator[None]:
    """Output and errors may be sent elsewhere in here; then they go where they went before."""
    _flush_output()
    before = {number: os.dup(number) for number in (OUT, ERR)}
    try:
        yield
    finally:
        _flush_output()
        for number, saved in before.items():
            os.dup2(saved, number)
            os.close(saved)


def _start(channel: socket.socket, sources: list[int]) -> "subprocess.Popen[bytes]":
    """The process that redacts; the one returned is gone as soon as that is up."""
    # A signal to all processes of a job is not for this one, from its first moment.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        paths = [str(_CODE), *filter(None, [os.environ.get("PYTHONPATH")])]
        return subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-S",
                "-m",
                "pipelines.base.redacting_process",
                *map(str, sources),
            ],
            stdin=channel.fileno(),
            pass_fds=sources,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _flush_output() -> None:
    """Have written what Python and C still hold of what this process has printed."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    ctypes.CDLL(None).fflush(None)
