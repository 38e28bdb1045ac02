"""scheduler.json: what Slurm last said about the jobs of one submission."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from pipelines.ledger.state import ENDED


@dataclass(frozen=True)
class SlurmJob:
    """One job, or one task of an array, as Slurm shows it."""

    id: str
    state: str
    reason: str = ""
    nodes: str = ""
    name: str = ""
    comment: str = ""
    exit: str = ""
    """Exit status and signal, `0:9`, where Slurm was asked for it."""
    used: float | None = None
    """Seconds that it has run since it was last started, by slurmctld's clock."""
    by: str = ""
    """Who has cancelled it, where accounting tells."""

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def never_ran(self) -> bool:
        """Whether it was cancelled while it was waiting for nodes: such a job is not put back."""
        return self.state == "CANCELLED" and self.used == 0

    @property
    def number(self) -> str:
        """The number of the job, without the task of an array."""
        return self.id.partition("_")[0]


@dataclass(frozen=True, kw_only=True)
class SchedulerView:
    VERSION: ClassVar[int] = 1

    token: str = ""
    jobs: Mapping[str, SlurmJob] = field(default_factory=dict)
    missing_since: float | None = None
    """Since when Slurm has not known one of them."""
    ended_since: float | None = None
    ended: bool = False
    """Whether all have ended for sure: one that is put back may show an end for a moment."""
