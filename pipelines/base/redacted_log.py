"""Logs that are safe to share: without secrets, readable by their owner and group only.

Redaction happens at the file descriptors: output of a C library, a helper process or a reward
function is redacted before it reaches a log.
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
    """Restrict the permissions of log files that a launcher opened for this process."""
    for log in (OUT, ERR):
        with suppress(OSError):  # another user's file
            mode = os.fstat(log).st_mode
            if stat.S_ISREG(mode):
                os.fchmod(log, stat.S_IMODE(mode) & LOG_MODE)


@contextmanager
def redacted_log() -> Iterator[None]:
    """Redact the output of this process and its children; at the end all of it is in the log."""
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
            # Once the stage's result is known, all of its output is in its log.
            channel.sendall(b".")
            channel.recv(1)
        process.wait()


@contextmanager
def output_put_back() -> Iterator[None]:
    """Stdout and stderr may be redirected in here; afterwards they are restored."""
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
    """Start the redacting process; the one returned exits as soon as that one runs."""
    # Signals to all processes of a job must not reach this one, from its first moment.
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
    """Flush the output buffers of Python and C."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    ctypes.CDLL(None).fflush(None)
