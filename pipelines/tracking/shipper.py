"""The shipper: one background process of a clone that brings MLflow up to date with the ledger.

Importing mlflow takes seconds, so no driver does: it starts this process and goes on. At most one
ships at a time. It holds a lock, and after letting go of it looks once more, so that whoever found
the lock taken a moment before can rely on being seen. It ends by itself when all is shipped, and
gives up when MLflow does not answer and no job runs. Nothing is lost by that: the next command
starts another.
"""

import os
import sys
import time
from enum import Enum, auto
from typing import TYPE_CHECKING

from pipelines.base.background import PATIENCE_S, Background, run_in_background
from pipelines.base.repository import Repository
from pipelines.dvc_repo.repair import Watch
from pipelines.ledger.cleanup import clear_debris
from pipelines.slurm.scheduler import Scheduler
from pipelines.tracking import openlineage
from pipelines.tracking.cursor import (
    Scanner,
    note_problem,
    store_address,
    unshipped,
)
from pipelines.tracking.cursor import problem as mlflow_problem

if TYPE_CHECKING:
    from pipelines.tracking.rounds import Tracker

__all__ = ["problem", "start_shipper", "unshipped"]

SWITCH = "LOCKSTEP_TRACKING"
INTERVAL_S = 1.0
LINGER_S = 5.0
"""How long to stay after the last work: bridges the gap between two stages."""
GIVE_UP_S = 25.0
LONGEST_PAUSE_S = 15.0


def is_switched_off() -> bool:
    """Whether the user wants nothing shipped to MLflow."""
    return os.environ.get(SWITCH, "").lower() in ("off", "0", "false", "no")


def start_shipper(repository: Repository) -> None:
    """See to it that a shipper runs, and what tells OpenLineage; returns at once, never fails."""
    openlineage.start_emitter(repository)
    if not is_switched_off():
        _process(repository).start()


def is_shipping(repository: Repository) -> bool:
    """Whether a shipper is at work in this clone, or lingers."""
    return _process(repository).works()


def problem(repository: Repository) -> str | None:
    """What is in the way of MLflow or OpenLineage, in words for people."""
    found = [mlflow_problem(repository), openlineage.problem(repository)]
    return "\n".join(filter(None, found)) or None


class End(Enum):
    """Why a shipper stopped."""

    IDLE = auto()
    GAVE_UP = auto()
    NOT_WANTED = auto()
    """The clone is gone, or newer commands name another MLflow."""


def run_shipper(repository: Repository, patience: float) -> None:
    """Ship until there is nothing left to do, unless somebody else does already."""
    process = _process(repository)
    while True:
        with process.alone(patience) as held:
            if not held:
                return
            clear_debris(repository)
            end = _ship(repository, process)
        if end is not End.IDLE or not repository.home.is_dir() or not _busy(Scanner(repository)):
            return
        patience = PATIENCE_S


def _ship(repository: Repository, process: Background) -> End:
    scanner, watch = Scanner(repository), Watch(repository)
    tracker: Tracker | None = None
    pause = INTERVAL_S
    worked = progressed = time.monotonic()
    while process.is_wanted():
        Scheduler(repository).look()
        watch.look()
        if _busy(scanner):
            worked = time.monotonic()
            if tracker is None:
                tracker = _make_tracker(repository)
                if tracker is None:
                    return End.GAVE_UP
                # Importing MLflow takes long, and is no fault of the server's.
                progressed = time.monotonic()
            if tracker.sync() is None:
                progressed, pause = time.monotonic(), INTERVAL_S
            else:
                pause = min(pause * 2, LONGEST_PAUSE_S)
                if not tracker.jobs_alive and time.monotonic() - progressed > GIVE_UP_S:
                    return End.GAVE_UP
        elif time.monotonic() - worked > LINGER_S:
            return End.IDLE
        process.pause(pause)
    if tracker is not None:
        tracker.abandon()
    return End.NOT_WANTED


def _make_tracker(repository: Repository) -> "Tracker | None":
    from pipelines.tracking.rounds import Tracker

    try:
        return Tracker(repository)
    except ImportError as error:
        remedy = "install the extra `control`"
        note_problem(repository, f"MLflow cannot be imported here ({error}): {remedy}")
        return None


def _busy(scanner: Scanner) -> bool:
    return any(group.busy for group in scanner.groups())


def _process(repository: Repository) -> Background:
    return Background(
        repository, "shipper", "pipelines.tracking.shipper", store_address(repository)
    )


if __name__ == "__main__":
    run_in_background(run_shipper, sys.argv[1:])
