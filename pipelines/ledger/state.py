"""The states of a job, of its processes, and Slurm's words for them."""

from enum import StrEnum

WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
"""Slurm's words for a job that has yet to start, or to start again."""
PAUSED = ("SUSPENDED", "STOPPED")
"""Slurm's words for a job that keeps its nodes and computes nothing."""
VANISHED = "VANISHED"
"""Our word for a job that no command of Slurm's knows any more."""
ENDED = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"),
    *("BOOT_FAIL", "DEADLINE", "REVOKED", VANISHED),
)


class State(StrEnum):
    """Where an entry stands."""

    NEW = "new"
    QUEUED = "queued"
    """Slurm has it and has not started it, or has put it back."""
    STARTING = "starting"
    RUNNING = "running"
    SUSPENDED = "suspended"
    """Slurm has halted its processes until somebody has it go on."""
    COMPLETED = "completed"
    """The outputs are whole and wait in `out/`."""
    PUBLISHED = "published"
    """The outputs are in the workspace."""
    FAILED = "failed"
    CANCELLED = "cancelled"
    DIED = "died"
    """The worker is gone and reported no result."""

    @property
    def alive(self) -> bool:
        return self in (State.QUEUED, State.STARTING, State.RUNNING, State.SUSPENDED)


class TaskState(StrEnum):
    """What a process reports of itself where the attempt as a whole goes on."""

    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    """It saved and ended because Slurm wanted it to; the job is to go on later."""
    LOST_A_RANK = "lost a rank"
    BAD_NODE = "bad node"
    """It found before the stage began that the job should go on elsewhere."""
