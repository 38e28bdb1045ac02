"""How programs are kept in, what they run as, and how they end."""

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
