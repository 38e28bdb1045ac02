"""Background processes of a clone: started by any command, sending to the address that the latest
command named.

At most one of a kind runs at a time: it holds a lock. A command with another address writes that
address to a file, upon which the running process exits; the new one waits longer for the lock. A
process exits when everything is sent, or when nothing gets through and no job runs: what is left is
in the ledger, and the next command starts another process.
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
from typing import Any, BinaryIO, Protocol

from pipelines.base import atomic
from pipelines.base.locks import hold_lock, is_locked
from pipelines.base.redact import RedactedStream, redact
from pipelines.base.redacted_log import open_log
from pipelines.base.repository import Repository

LOCK_TIMEOUT_S = 0.3
"""How long to try for the lock: another process may be probing it."""
HANDOVER_TIMEOUT_S = 60.0
START_TIMEOUT_S = 60.0
"""How long a command waits while no process runs: one has to start, or to take over."""
INTERVAL_S = 1.0
LONGEST_PAUSE_S = 15.0
LINGER_S = 5.0
"""How long to stay after the last work: bridges the gap between two stages."""
GIVE_UP_S = 25.0
LONGEST_SLEEP_S = 1.0
POLL_S = 0.1
LARGEST_LOG = 256 * 1024

_started: list[subprocess.Popen[bytes]] = []


def start_process(
    words: list[str], folder: Path, environment: dict[str, str], log: BinaryIO
) -> subprocess.Popen[bytes]:
    """Start a process that outlives this one."""
    return subprocess.Popen(
        words,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


class Sender(Protocol):
    """What a background process does again and again."""

    @property
    def jobs_alive(self) -> bool:
        """Whether a job runs that will have something to send."""

    def is_busy(self) -> bool:
        """Whether there is something to send, or will be soon."""

    def connect(self) -> bool:
        """Called once, when there is something to send; False if that is impossible."""

    def send(self) -> bool:
        """Send what there is; whether all of it got through."""

    def close(self) -> None:
        """Called in the end if it is connected."""


def run_in_background(work: Callable[[Repository, float], None], arguments: list[str]) -> None:
    """The main function of such a process: low priority, redacted output, errors in its log."""
    root, lock_timeout = arguments
    os.nice(10)
    sys.stdout = RedactedStream(sys.stdout)  # type: ignore[assignment]
    sys.stderr = RedactedStream(sys.stderr)  # type: ignore[assignment]
    try:
        work(Repository(Path(root)), float(lock_timeout))
    except Exception:
        traceback.print_exc()


@dataclass(frozen=True)
class Background:
    """One kind of background process of a clone."""

    repository: Repository
    name: str
    """Of its lock, its log and its other files, under `.lockstep`."""
    module: str
    """The module it runs, with the clone and the timeout for the lock as arguments."""
    address: str
    """Where this command, or this process, sends to."""

    def start(self) -> None:
        """Make sure that one runs; returns at once and never raises."""
        # Reaped here, because a long-running caller would collect zombies.
        _started[:] = [process for process in _started if process.poll() is None]
        try:
            wanted = self._wanted()
            if wanted == self.address and self.is_running():
                return
            if wanted != self.address:
                atomic.write_json(self._path(".json"), {"address": self.address})
            # One with another address has to finish first; otherwise there is nothing to wait for.
            is_first = wanted in (None, self.address)
            self._spawn(LOCK_TIMEOUT_S if is_first else HANDOVER_TIMEOUT_S)
        except OSError:
            # A full disk, or no more processes: the stage fails on that too, with a better error.
            return

    def is_running(self) -> bool:
        return is_locked(self._path(".lock"))

    def is_wanted(self) -> bool:
        """Whether the clone still exists and no newer command names another address."""
        return self.repository.home.is_dir() and self._wanted() in (None, self.address)

    def serve(self, make_sender: Callable[[], Sender], lock_timeout: float) -> None:
        """Send until there is nothing left, unless another process does already."""
        while True:
            with self._lock(lock_timeout) as held:
                if not held:
                    return
                sender = make_sender()
                if not self._send_all(sender):
                    return
            # Whoever found the lock taken a moment ago relies on being seen.
            if not self.repository.home.is_dir() or not sender.is_busy():
                return
            lock_timeout = LOCK_TIMEOUT_S

    def _send_all(self, sender: Sender) -> bool:
        """Whether it ended because all is sent."""
        connected, pause = False, INTERVAL_S
        worked = progressed = time.monotonic()
        try:
            while self.is_wanted():
                if sender.is_busy():
                    if not connected and not sender.connect():
                        return False
                    if not connected:
                        # It may take long, and is no fault of the server's.
                        connected, progressed = True, time.monotonic()
                    worked = time.monotonic()
                    if sender.send():
                        progressed, pause = time.monotonic(), INTERVAL_S
                    else:
                        pause = min(pause * 2, LONGEST_PAUSE_S)
                        if not sender.jobs_alive and time.monotonic() - progressed > GIVE_UP_S:
                            return False
                elif time.monotonic() - worked > LINGER_S:
                    return True
                self.pause(pause)
            return False
        finally:
            if connected:
                sender.close()

    def wait(self, is_left: Callable[[], bool], deadline: float | None, before: Any) -> None:
        """Wait until nothing is left to send, or a problem is noted that is not `before`.

        The deadline is of `time.monotonic`. Without one, for as long as a process runs.
        """
        end = time.monotonic() + START_TIMEOUT_S if deadline is None else deadline
        while True:
            is_late = time.monotonic() >= end
            # Looked at before it gives up: what waits here may have been held up as well.
            if deadline is None and self.is_running():
                end, is_late = time.monotonic() + START_TIMEOUT_S, False
            problem = self.problem()
            # A process that sends elsewhere, and is about to exit, may still note its own problem.
            if problem and problem != before and problem["address"] == self.address:
                return
            # A problem that is solved is removed last of all.
            if is_late or (not is_left() and not (problem and self.is_running())):
                return
            time.sleep(POLL_S)

    def note_problem(self, text: str | None) -> None:
        """Keep what prevents sending for the commands to print, or remove it."""
        if text is None:
            self._path("_problem.json").unlink(missing_ok=True)
        elif self.repository.home.is_dir():
            note = {"text": redact(text), "time": time.time(), "address": self.address}
            atomic.write_json(self._path("_problem.json"), note)

    def problem(self) -> dict[str, Any] | None:
        """The noted problem: its text, time and address."""
        noted: dict[str, Any] | None = atomic.read_json(self._path("_problem.json"))
        return noted

    def pause(self, seconds: float) -> None:
        """Sleep while it is wanted: the process that waits for the lock waits for this."""
        end = time.monotonic() + seconds
        while self.is_wanted() and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, LONGEST_SLEEP_S))

    @contextmanager
    def _lock(self, timeout: float) -> Iterator[bool]:
        """Hold the lock; yields whether it was acquired in time."""
        deadline = time.monotonic() + timeout
        while True:
            with hold_lock(self._path(".lock")) as held:
                if held or time.monotonic() > deadline:
                    yield held
                    return
            time.sleep(0.02)

    def _spawn(self, lock_timeout: float) -> None:
        root = self.repository.root
        source = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
        words = [sys.executable, "-m", self.module, str(root), str(lock_timeout)]
        with open_log(self._log()) as log:
            _started.append(start_process(words, root, {**os.environ, "PYTHONPATH": path}, log))

    def _wanted(self) -> str | None:
        """The address that the latest command named; None too where the file is damaged."""
        try:
            latest = atomic.read_json(self._path(".json"))
        except ValueError:
            return None
        return latest.get("address") if isinstance(latest, dict) else None

    def _log(self) -> Path:
        path = self._path(".log")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > LARGEST_LOG:
            path.replace(path.with_suffix(".log.old"))
        return path

    def _path(self, ending: str) -> Path:
        return self.repository.home / f"{self.name}{ending}"
