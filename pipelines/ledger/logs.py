"""The lines of a job's log that are the stage's own."""

from pathlib import Path

_LAUNCHER_PREFIX = "submitit "
"""What submitit says of itself, which nobody who reads a stage's log wants."""


def lines_of(path: Path) -> list[str]:
    """A log without the launcher's lines."""
    text = path.read_text(errors="replace", encoding="utf-8")
    return [line for line in text.splitlines() if not is_launchers(line)]


def is_launchers(line: str) -> bool:
    return line.startswith(_LAUNCHER_PREFIX)
