"""A process of a clone that works behind the commands: started by any of them, alone, and talking
to whom the latest of them named.

At most one of a kind works at a time. It holds a lock; a command that names another address leaves
word, so that the one at work makes room, and waits longer for the lock than others do.
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
"""How long to try for the lock: somebody may be probing it just now."""
HANDOVER_PATIENCE_S = 60.0
NOBODY_S = 60.0
"""How long a command waits while nobody is at work: one has to start, or to take over."""
LONGEST_NAP_S = 1.0
LARGEST_LOG = 256 * 1024

_started: list[subprocess.Popen[bytes]] = []


def run_in_background(work: Callable[[Repository, float], None], arguments: list[str]) -> None:
    """The life of such a process: modest, discreet, and with its last word in its log."""
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
    """Of a command that waits for such a process: until a time has passed, or while one works."""

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
    """Of its lock, its log and the latest command's word, under `.lockstep`."""
    module: str
    """What it runs, with the clone and the patience as arguments."""
    address: str
    """Whom this command, or this process, talks to."""

    def start(self) -> None:
        """See to it that one runs; returns at once and never fails its caller."""
        # Reaped here, because a caller that lives long would collect dead children.
        _started[:] = [process for process in _started if process.poll() is None]
        try:
            wanted = self._wanted()
            if wanted == self.address and self.works():
                return
            if wanted != self.address:
                atomic.write_json(self._path(".json"), {"address": self.address})
            # One that talks to another has to finish first; nobody else is worth a wait.
            patience = PATIENCE_S if wanted in (None, self.address) else HANDOVER_PATIENCE_S
            self._spawn(patience)
        except OSError:
            # A full disk or no process to be had: the stage itself meets that too, and says so
            # better.
            return

    def works(self) -> bool:
        """Whether one is at work."""
        return is_locked(self._path(".lock"))

    def is_wanted(self) -> bool:
        """Whether the clone is still there and no newer command names another address."""
        return self.repository.home.is_dir() and self._wanted() in (None, self.address)

    def pause(self, seconds: float) -> None:
        """Sleep, and for no longer than it is wanted: who waits for the lock waits for this."""
        end = time.monotonic() + seconds
        while self.is_wanted() and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, LONGEST_NAP_S))

    @contextmanager
    def alone(self, patience: float) -> Iterator[bool]:
        """Hold the lock; yields whether it could be had in time."""
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
        """Whom the latest command named."""
        word = atomic.read_json(self._path(".json")) or {}
        return word.get("address")

    def _log(self) -> Path:
        path = self._path(".log")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > LARGEST_LOG:
            path.replace(path.with_suffix(".log.old"))
        return path

    def _path(self, ending: str) -> Path:
        return self.repository.home / f"{self.name}{ending}"
