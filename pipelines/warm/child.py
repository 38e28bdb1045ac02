"""A forked process becomes the one that was asked for: its command, files, folder and limits."""

import gc
import os
import random
import resource
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pipelines.warm.title import set_title

_LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]


@dataclass(frozen=True)
class Request:
    """A command as `python -m` would start it, and all that a process inherits."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    minutes: float | None
    """Most minutes that it may take."""
    umask: int
    niceness: int
    cores: list[int]
    limits: dict[str, list[int]]

    @classmethod
    def from_here(
        cls,
        module: str,
        arguments: list[str],
        environment: dict[str, str],
        folder: str,
        minutes: float | None = None,
    ) -> "Request":
        """A command that inherits what a child of this process would."""
        os.umask(mask := os.umask(0o077))
        return cls(
            module,
            arguments,
            environment,
            folder,
            minutes,
            umask=mask,
            niceness=os.nice(0),
            cores=sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
            limits={name: list(resource.getrlimit(getattr(resource, name))) for name in _LIMITS},
        )


def become(request: Request, files: list[int]) -> None:
    """Be the process of that request; the first three files are its input, output and errors.

    It leads a session of its own already.
    """
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
        os.close(file)
    _open_streams()
    for file in files[3:]:
        os.set_inheritable(file, False)  # held by this process, and by nothing that it starts
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        default = number is signal.SIGINT
        signal.signal(number, signal.default_int_handler if default else signal.SIG_DFL)
    words = [sys.executable, "-m", request.module, *request.arguments]
    set_title(words)
    sys.argv = words[2:]
    os.environ.clear()
    os.environ.update(request.environment)
    time.tzset()
    os.chdir(request.folder)
    os.umask(request.umask)
    _take_limits(request)
    _reseed()


def _open_streams() -> None:
    """Python's own: each remembers for what kind of file it was opened, a log or a pipe."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        stream = getattr(sys, name)
        how = {"encoding": stream.encoding, "errors": stream.errors}
        stream = open(number, mode, buffering=1, closefd=False, **how)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _reseed() -> None:
    """Two forks of one process would draw the same random numbers."""
    random.seed()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()


def _take_limits(request: Request) -> None:
    for name, values in request.limits.items():
        # What this system has no such limit for, or what only its administrator may raise.
        with suppress(AttributeError, ValueError, OSError):
            resource.setrlimit(getattr(resource, name), (values[0], values[1]))
    with suppress(OSError):
        os.nice(request.niceness - os.nice(0))
    if request.cores and hasattr(os, "sched_setaffinity"):
        with suppress(OSError):
            os.sched_setaffinity(0, request.cores)


def forget_files() -> None:
    """Close what a forked process has of its parent's files, whoever refers to them."""
    gc.freeze()  # an object that is collected later would close somebody else's file
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
