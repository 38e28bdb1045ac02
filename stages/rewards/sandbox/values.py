"""What goes into the sandbox and what comes out: limits, results, and the two ways it can fail.

A result is about the program, whatever it did. Where the sandbox itself could not do its work there
is no result but an error, so that a broken machine never looks like a wrong program.
"""

from dataclasses import dataclass
from enum import StrEnum


class IsolationKind(StrEnum):
    """What stands between a program and this machine."""

    NAMESPACES = "namespaces"
    """Namespaces of the kernel, made by us."""
    BUBBLEWRAP = "bubblewrap"
    """The same, made by bubblewrap."""
    NONE = "none"
    """Limits and a filter of system calls; it can read and write what its user can."""


class SandboxRole(StrEnum):
    """What a sandbox is for."""

    PROGRAM = "program"
    """To run it as a script."""
    CANDIDATE = "candidate"
    """To hold a program that is put to the test."""
    JUDGE = "judge"
    """To hold the tests."""
    INTERPRETER = "interpreter"
    """To execute one piece of code after the other."""


class Status(StrEnum):
    """How a program ended."""

    FINISHED = "finished"
    """It exited by itself, with whatever code."""
    TIMEOUT = "timeout"
    """It reached `wall_s`."""
    CPU = "cpu"
    """It reached `cpu_s`."""
    MEMORY = "memory"
    """All its processes together reached `memory_mb`; one alone gets a MemoryError."""
    PROCESSES = "processes"
    """More than `processes` were alive, on a kernel that does not hold this limit by itself."""
    OUTPUT = "output"
    """It wrote more than `output_kb`."""
    KILLED = "killed"
    """A SIGKILL that was not ours: its own, or the kernel's when the machine ran out of memory."""
    CRASHED = "crashed"
    """Another signal, such as a segmentation fault."""


@dataclass(frozen=True)
class Limits:
    """What one program may use, all its processes together unless it says otherwise.

    In a session the limits of time are those of an execution (see session.py).
    """

    cpu_s: float = 10.0
    """Seconds of CPU time. The limit that should bite first: it does not depend on the load."""
    wall_s: float = 60.0
    """Seconds from start to end; generous, because other work on the machine eats into it."""
    memory_mb: int = 512
    """Memory; also the address space of each process."""
    processes: int = 16
    """Processes and threads alive at a time."""
    file_mb: int = 16
    """All files together, which live in memory."""
    output_kb: int = 256
    """Standard output, and standard error again as much."""


@dataclass(frozen=True)
class ProgramResult:
    """The result of a program."""

    status: Status
    exit_code: int | None
    """Its exit code, where it finished."""
    stdout: str
    """Cut at `output_kb`."""
    stderr: str
    """Cut at `output_kb`."""

    @property
    def succeeded(self) -> bool:
        return self.status is Status.FINISHED and self.exit_code == 0


class SandboxUnavailable(Exception):
    """This machine offers no isolation."""


class SandboxBroken(Exception):
    """The sandbox failed; nothing is known about the program."""
