"""The shipper: one background process of a clone that brings MLflow up to date with the ledger.

Importing mlflow takes seconds, so no driver does: it starts this process and goes on. At most one
ships at a time. It holds a lock, and after letting go of it looks once more, so that whoever found
the lock taken a moment before can rely on being seen. It ends by itself when all is shipped, and
gives up when MLflow does not answer and no job runs. Nothing is lost by that: the next command
starts another.
"""

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines import atomic
from pipelines.debris import clear_debris
from pipelines.dvc_files import Watch
from pipelines.ledger import hold_lock, is_locked
from pipelines.redact import RedactedStream
from pipelines.repository import Repository
from pipelines.scheduler import Scheduler
from pipelines.tracking_cursor import (
    Scanner,
    note_problem,
    problem,
    store_address,
    unshipped,
)

if TYPE_CHECKING:
    from pipelines.tracking import Tracker

__all__ = ["problem", "start_shipper", "unshipped"]

SWITCH = "LOCKSTEP_TRACKING"
INTERVAL_S = 1.0
LINGER_S = 5.0
"""How long to stay after the last work: bridges the gap between two stages."""
GIVE_UP_S = 25.0
LONGEST_PAUSE_S = 15.0
PATIENCE_S = 0.3
"""How long to try for the lock: somebody may be probing it just now."""
HANDOVER_PATIENCE_S = 60.0
LARGEST_LOG = 256 * 1024

_started: list[subprocess.Popen[bytes]] = []


def is_switched_off() -> bool:
    """Whether the user wants nothing shipped."""
    return os.environ.get(SWITCH, "").lower() in ("off", "0", "false", "no")


def start_shipper(repository: Repository) -> None:
    """See to it that a shipper runs; returns at once and never fails its caller."""
    if is_switched_off():
        return
    # Reaped here, because a caller that lives long would collect dead children.
    _started[:] = [process for process in _started if process.poll() is None]
    try:
        address = store_address(repository)
        wanted = _wanted_store(repository)
        if wanted == address and is_locked(_lock(repository)):
            return
        if wanted != address:
            atomic.write_json(_wish(repository), {"store": address})
        # A shipper to another MLflow has to finish first; nobody else is worth a wait.
        patience = PATIENCE_S if wanted in (None, address) else HANDOVER_PATIENCE_S
        command = [sys.executable, "-m", "pipelines.shipper", str(repository.root), str(patience)]
        source = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
        with _log(repository).open("ab") as log:
            _started.append(
                subprocess.Popen(
                    command,
                    cwd=repository.root,
                    env={**os.environ, "PYTHONPATH": path},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
    except OSError:
        # A full disk or no process to be had: the stage itself meets that too, and says so better.
        return


class End(Enum):
    """Why a shipper stopped."""

    IDLE = auto()
    GAVE_UP = auto()
    NOT_WANTED = auto()
    """The clone is gone, or newer commands name another MLflow."""


def run_shipper(repository: Repository, patience: float) -> None:
    """Ship until there is nothing left to do, unless somebody else does already."""
    while True:
        with _only_one(_lock(repository), patience) as held:
            if not held:
                return
            clear_debris(repository)
            end = _ship(repository)
        if end is not End.IDLE or not repository.home.is_dir() or not _busy(Scanner(repository)):
            return
        patience = PATIENCE_S


def _ship(repository: Repository) -> End:
    scanner, watch = Scanner(repository), Watch(repository)
    tracker: Tracker | None = None
    pause = INTERVAL_S
    worked = progressed = time.monotonic()
    while _is_wanted(repository):
        Scheduler(repository).look()
        watch.look()
        if _busy(scanner):
            worked = time.monotonic()
            tracker = tracker or _make_tracker(repository)
            if tracker is None:
                return End.GAVE_UP
            if tracker.sync() is None:
                progressed, pause = time.monotonic(), INTERVAL_S
            else:
                pause = min(pause * 2, LONGEST_PAUSE_S)
                if not tracker.jobs_alive and time.monotonic() - progressed > GIVE_UP_S:
                    return End.GAVE_UP
        elif time.monotonic() - worked > LINGER_S:
            return End.IDLE
        time.sleep(pause)
    if tracker is not None:
        tracker.abandon()
    return End.NOT_WANTED


def _make_tracker(repository: Repository) -> "Tracker | None":
    from pipelines.tracking import Tracker

    try:
        return Tracker(repository)
    except ImportError as error:
        remedy = "install the extra `control`"
        note_problem(repository, f"MLflow cannot be imported here ({error}): {remedy}")
        return None


def _is_wanted(repository: Repository) -> bool:
    address = store_address(repository)
    return repository.home.is_dir() and _wanted_store(repository) in (None, address)


def _busy(scanner: Scanner) -> bool:
    return any(group.busy for group in scanner.groups())


@contextmanager
def _only_one(path: Path, patience: float) -> Iterator[bool]:
    deadline = time.monotonic() + patience
    while True:
        with hold_lock(path) as held:
            if held or time.monotonic() > deadline:
                yield held
                return
        time.sleep(0.02)


def _lock(repository: Repository) -> Path:
    return repository.home / "shipper.lock"


def _wish(repository: Repository) -> Path:
    return repository.home / "shipper.json"


def _wanted_store(repository: Repository) -> str | None:
    """Which MLflow the latest command named."""
    wish = atomic.read_json(_wish(repository)) or {}
    return wish.get("store")


def _log(repository: Repository) -> Path:
    path = repository.home / "shipper.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > LARGEST_LOG:
        path.replace(path.with_suffix(".log.old"))
    return path


def main(arguments: list[str]) -> None:
    root, patience = arguments
    os.nice(10)
    sys.stdout = RedactedStream(sys.stdout)  # type: ignore[assignment]
    sys.stderr = RedactedStream(sys.stderr)  # type: ignore[assignment]
    try:
        run_shipper(Repository(Path(root)), float(patience))
    except Exception:
        traceback.print_exc()


if __name__ == "__main__":
    main(sys.argv[1:])
