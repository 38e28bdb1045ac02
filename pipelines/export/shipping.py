"""The shipper's process: MLflow is brought up to date, and finished policies are registered.

`pipelines/tracking/shipper.py` starts it.
"""

import sys
import time
from enum import Enum, auto

from pipelines.base.background import PATIENCE_S, Background, run_in_background
from pipelines.base.repository import Repository
from pipelines.dvc_repo.repair import Watch
from pipelines.export.registry import register_last
from pipelines.ledger.cleanup import remove_stale_files
from pipelines.slurm.scheduler import Scheduler
from pipelines.tracking.cursor import Scanner, note_problem
from pipelines.tracking.rounds import Tracker
from pipelines.tracking.shipper import shipper_process

INTERVAL_S = 1.0
LINGER_S = 5.0
"""How long to stay after the last work: bridges the gap between two stages."""
GIVE_UP_S = 25.0
LONGEST_PAUSE_S = 15.0


class End(Enum):
    """Why a shipper stopped."""

    IDLE = auto()
    GAVE_UP = auto()
    NOT_WANTED = auto()
    """The clone is gone, or newer commands name another MLflow."""


def run_shipper(repository: Repository, patience: float) -> None:
    """Ship until there is nothing left to do, unless somebody else does already."""
    process = shipper_process(repository)
    while True:
        with process.alone(patience) as held:
            if not held:
                return
            remove_stale_files(repository)
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
        Scheduler(repository).refresh()
        watch.repair()
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
        return Tracker(repository, register_last)
    except ImportError as error:
        remedy = "install the extra `control`"
        note_problem(repository, f"MLflow cannot be imported here ({error}): {remedy}")
        return None


def _busy(scanner: Scanner) -> bool:
    return any(group.busy for group in scanner.groups())


if __name__ == "__main__":
    run_in_background(run_shipper, sys.argv[1:])
