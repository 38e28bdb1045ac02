"""launch.json: how an attempt, or a session, is run, and by which job.

The driver writes it before the job is submitted, because the worker reads it, and again with what
the submission has told. Nothing in it is hashed: it says how a stage is computed, not what.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pipelines.base.processes import ProcessMark
from pipelines.config.profiles import ExecutorKind, Resources
from pipelines.ledger.invocation import Invocation
from pipelines.ledger.preflight import BadNode

_GPUS = re.compile(r"(?:gres/)?gpu(?::[^:,()]*[^:,()\d][^:,()]*)?(?::(\d+))?(?:\(.*\))?")
"""One word of `gres`: gpu, gpu:2, gpu:h200:8."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    VERSION: ClassVar[int] = 1

    executor: ExecutorKind
    profile: str
    resources: Resources
    clone: Path
    root: Path
    """Below it lie the inputs: the clone, or the workspace of a chain."""
    code: Path
    """The copy of the code that the job imports."""
    user: int
    time: float = 0.0
    """When it was submitted."""
    invocation: Invocation | None = None
    git_commit: str | None = None
    git_diff: str = ""
    num_shards: int = 1
    shards: tuple[int, ...] | None = None
    """Of an array of jobs: those that are not done."""
    graph: tuple[dict[str, Any], ...] = ()
    """For a report: the stages before it, with the hashes of their outputs."""
    restarts_before: int = 0
    """How often Slurm has restarted the jobs of earlier attempts."""
    excluded: tuple[BadNode, ...] = ()
    """Nodes that earlier attempts of the same command found to be bad."""
    prepared: bool = False
    """Whether a dry run has written it down, and nobody may ever submit it."""
    submitter: ProcessMark | None = None
    """Who is about to submit it."""
    token: str | None = None
    """What Slurm's list of jobs shows in the job's comment."""
    job: str | None = None
    """The job's name for people."""
    jobs: tuple[str, ...] = ()
    """Slurm's numbers of its jobs."""
    pid: int | None = None
    pid_started: str = ""
    session: Path | None = None
    """The session that it was posted to."""
    module: str = "pipelines.worker.worker"
    stages: tuple[str, ...] = ()
    """Of a session: those that it serves."""
    idle_minutes: float = 0.0
    """Of a session: how long it waits for the next stage."""

    @property
    def tasks_per_job(self) -> int:
        return self.resources.nodes * self.resources.tasks_per_node

    @property
    def gpus_per_job(self) -> int:
        """Those that are the job's while it runs, whether or not it uses them.

        Without Slurm, which knows who has what, they are those that the stage computes on.
        """
        resources = self.resources
        on_gpu = resources.device.startswith("cuda")
        if self.executor is not ExecutorKind.SLURM:
            return max(resources.gpus_per_node, 1) if on_gpu else 0
        words = (resources.gres or "").replace(" ", "").split(",")
        named = sum(int(match[1] or 1) for word in words if (match := _GPUS.fullmatch(word)))
        # A partition may give whole nodes without being asked for GPUs: then each task has one.
        per_node = resources.gpus_per_node or named or (resources.tasks_per_node if on_gpu else 0)
        return resources.nodes * per_node

    @property
    def cores_per_job(self) -> int:
        """Those that were asked for."""
        return self.tasks_per_job * self.resources.cpus_per_task
