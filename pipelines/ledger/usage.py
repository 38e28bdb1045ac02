"""usage/: what each process of a job notes, while it runs, of the time and memory that it takes.

A file for each start of a process, so that one that was killed has said how long it had run. The
length is by a clock that nobody sets; the time of day only places it in the calendar. Nothing but
costs is made of it: no state is read off these files, and a job is no worse without them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pipelines.ledger import files
from pipelines.ledger.entry import Attempt
from pipelines.ledger.state import State, TaskState
from pipelines.ledger.task import Task

_FOLDER = "usage"


@dataclass(frozen=True, kw_only=True)
class Usage:
    """usage/RESTART.LABEL.json: one process, from its start up to its last word."""

    VERSION: ClassVar[int] = 1

    job: str | None
    """Slurm's number of its job, or of the task of an array."""
    restart: int
    host: str
    begun: float
    """When its job got its nodes, as far as Slurm tells, else when it began itself."""
    seconds: float = 0.0
    """How long it has had them."""
    start_up: float | None = None
    """After how many seconds the stage itself began; None before."""
    saved: float | None = None
    """After how many seconds the scratch was last seen to have something new in it."""
    state: State | TaskState | None = None
    """How it ended; None while it runs, and of a process that was killed."""
    memory_peak: int = 0
    """Bytes of it and its children, the most that was seen."""
    gpu_readings: int = 0
    gpu_busy: float | None = None
    """Percent, the mean of all readings of the GPUs that the job has on this node."""
    gpu_memory_peak: int | None = None
    """Bytes in use on the fullest of them."""


def usage_file(attempt: Attempt, task: Task) -> Path:
    return attempt.folder / _FOLDER / f"{task.restart:03}.{task.label}.json"


def usages_of(attempt: Attempt) -> list[Usage]:
    """Of all processes of all starts, in the order of the starts."""
    paths = sorted((attempt.folder / _FOLDER).glob("[!.]*.json"))
    return [usage for path in paths if (usage := files.read(Usage, path))]
