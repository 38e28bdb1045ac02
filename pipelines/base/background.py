"""Background processes of a clone: started by any command, sending to the address that the latest
command named.

At most one of a kind runs at a time. It holds a lock. A command with another address writes that
address to a file, upon which the running process exits; the new one waits longer for the lock.
"""

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipelines.base import atomic
from pipelines.base.locks import hold_lock, is_locked
from pipelines.base.redact import RedactedStream
from pipelines.base.redacted_log import open_log
from pipelines.base.repository import Repository

PATIENCE_S = 0.3
"""How long to try for the lock: another process may be probing it."""
HANDOVER_PATIENCE_S = 60.0
NOBODY_S = 60.0
"""How long a command waits while no process runs: one has to start, or to take over."""
LONGEST_NAP_S = 1.0
LARGEST_LOG = 256 * 1024

_started: list[subprocess.Popen[bytes]] = []


def run_in_background(work: Callable[[Repository, float], None], arguments: list[str]) -> None:
    """The main function of such a process: low priority, redacted output, errors in its log."""
    root, patience = arguments
    os.nice(10)
    sys.stdout = RedactedStream(sys.stdout)  # type: ignore[assignment]
    sys.stderr = RedactedStream(sys.stderr)  # type: ignore[assignment]
    try:
        work(Repository(Path(root)), float(patience))
    except Exception:
        traceback.print_exc()


@dataclass
class Patience:
    """The deadline of a command that waits: after a timeout, or while the process works."""

    works: Callable[[], bool]
    timeout: float | None

    def __post_init__(self) -> None:
        self._end = time.monotonic() + (NOBODY_S if self.timeout is None else self.timeout)

    def lasts(self) -> bool:
        if self.timeout is None and self.works():
            self._end = time.monotonic() + NOBODY_S
        return time.monotonic() < self._end


@dataclass(frozen=True)
class Background:
    """One kind of background process of a clone."""

    repository: Repository
    name: str
    """Of its lock, its log and the file with the latest address, under `.lockstep`."""
    module: str
    """The module it runs, with the clone and the patience as arguments."""
    address: str
    """Where this command, or this process, sends to."""

    def start(self) -> None:
        """Make sure that one runs; returns at once and never raises."""
        # Reaped here, because a long-running caller would collect zombies.
        _started[:] = [process for process in _started if process.poll() is None]
        try:
            wanted = self._wanted()
            if wanted == self.address and self.works():
                return
            if wanted != self.address:
                atomic.write_json(self._path(".json"), {"address": self.address})
            # One with another address has to finish first; otherwise there is nothing to wait for.
            patience = PATIENCE_S if wanted in (None, self.address) else HANDOVER_PATIENCE_S
            self._spawn(patience)
        except OSError:
            # A full disk, or no more processes: the stage fails on that too, with a better error.
            return

    def works(self) -> bool:
        """Whether one is running."""
        return is_locked(self._path(".lock"))

    def is_wanted(self) -> bool:
        """Whether the clone still exists and no newer command names another address."""
        return self.repository.home.is_dir() and self._wanted() in (None, self.address)

    def pause(self, seconds: float) -> None:
        """Sleep while it is wanted: the process that waits for the lock waits for this."""
        end = time.monotonic() + seconds
        while self.is_wanted() and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, LONGEST_NAP_S))

    @contextmanager
    def alone(self, patience: float) -> Iterator[bool]:
        """Hold the lock; yields whether it was acquired in time."""
        deadline = time.monotonic() + patience
        while True:
            with hold_lock(self._path(".lock")) as held:
                if held or time.monotonic() > deadline:
                    yield held
                    return
            time.sleep(0.02)

    def _spawn(self, patience: float) -> None:
        root = self.repository.root
        source = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
        with open_log(self._log()) as log:
            _started.append(
                subprocess.Popen(
                    [sys.executable, "-m", self.module, str(root), str(patience)],
                    cwd=root,
                    env={**os.environ, "PYTHONPATH": path},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _wanted(self) -> str | None:
        """The address that the latest command named."""
        latest = atomic.read_json(self._path(".json")) or {}
        return latest.get("address")

    def _log(self) -> Path:
        path = self._path(".log")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > LARGEST_LOG:
            path.replace(path.with_suffix(".log.old"))
        return path

    def _path(self, ending: str) -> Path:
        return self.repository.home / f"{self.name}{ending}"
