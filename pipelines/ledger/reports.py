"""What the processes of a job report: worker.json, result.json and tasks/*.json of an attempt."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from pipelines.ledger.state import State, TaskState


@dataclass(frozen=True, kw_only=True)
class Worker:
    """worker.json: the process that leads, from its start on."""

    VERSION: ClassVar[int] = 1

    pid: int
    host: str
    time: float
    restart: int = 0
    """How often Slurm had started the job again."""
    environment: dict[str, Any] = field(default_factory=dict)
    """The machine and its packages, once they are known."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """result.json: how an attempt, or a session, ended."""

    VERSION: ClassVar[int] = 1

    state: State | TaskState
    """In the file, always the state of the attempt as a whole."""
    error: str | None = None
    retryable: bool = False
    """Whether another try may do better with nothing changed."""
    why: str | None = None
    """Of a session: why it ended."""
    outs: dict[str, str] | None = None
    """The hashes of the outputs, by path."""
    metrics: dict[str, Any] | None = None
    started: float | None = None
    ended: float | None = None
    environment: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TaskReport:
    """tasks/LABEL.json: what one process of a job on Slurm last reported."""

    VERSION: ClassVar[int] = 1

    rank: int
    shard: int
    num_shards: int
    job: str | None
    host: str
    pid: int
    restart: int
    log: str
    """How the names of its logs begin."""
    what: str
    """Which process it is, in words; nothing where there is only one."""
    state: State | TaskState
    error: str | None = None
    time: float
