"""entry.json and record.json: who asked for a stage, and what came out."""

from dataclasses import dataclass
from typing import Any, ClassVar

from pipelines.ledger.invocation import Invocation


@dataclass(frozen=True, kw_only=True)
class Origin:
    """entry.json: who asked for a stage, and from what."""

    VERSION: ClassVar[int] = 1

    invocation: Invocation
    git_commit: str | None
    experiment: str | None
    """DVC's name of the experiment, in one."""
    title: str
    """What MLflow's run of the command is called."""
    created: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Record:
    """record.json: what came out, with hashes, machine and times; the end of an entry."""

    VERSION: ClassVar[int] = 1

    stage: str
    fingerprint: str
    inputs: dict[str, str]
    outs: dict[str, str]
    metrics: dict[str, Any] | None
    attempts: int
    started: float
    ended: float
    published: float
    environment: dict[str, Any]
    git_commit: str | None
    experiment: str | None
    invocation: Invocation
    earlier_environments: tuple[dict[str, Any], ...] = ()
    """Other machines that had a hand in it."""
