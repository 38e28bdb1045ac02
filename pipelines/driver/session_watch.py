"""Taking a stage back from a session that hangs: its process is there, and sends no heartbeats.

A session sends a heartbeat every few seconds, whatever it computes. Where none comes, its posts are
taken back: at once where it has not begun with them, and otherwise with its process, because two
must not work at one stage. Silence is measured by this process's own clock, from the last heartbeat
that it has seen, so wrong clocks take nothing from a session that works. One that waits in Slurm's
queue, or that Slurm has suspended, is not silent but idle.
"""

import time
from collections.abc import Callable

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.driver.executors import end_host, session_of
from pipelines.ledger import mailbox
from pipelines.ledger.entry import Attempt
from pipelines.ledger.state import State
from pipelines.worker.session import STALE_S

HANG_S = 600.0
"""Silence after which a stage is taken from a session that has begun with it."""


class SessionWatch:
    """One driver's eye on the session that has its attempt."""

    def __init__(
        self, repository: Repository, attempt: Attempt, say: Callable[[str], None]
    ) -> None:
        self._repository, self._attempt, self._say = repository, attempt, say
        self._session = session_of(attempt)
        self._last_beat: float | None = None
        self._since = time.monotonic()
        self._warned = False

    def check(self) -> None:
        """Take the attempt back from a session that has been silent for too long."""
        silent_s = self._silence()
        if silent_s < STALE_S:
            self._warned = False
            return
        label = self._session.label
        problem = f"session {label} hangs: no heartbeat for {silent_s:.0f} s"
        if mailbox.withdraw(self._session.folder, self._attempt.folder):
            self._session.request_end()
            self._say(f"{problem}; taking the stage back")
        elif silent_s >= HANG_S:
            self._say(f"{problem}; ending it")
            self._session.request_end()
            if not end_host(self._repository, self._session):
                raise LockstepError(
                    f"{self._attempt.entry.stage}: session {label} hangs and does not end, and two "
                    "must not work at one stage; end it (`squeue`, `kill -9`), then run the same "
                    "command"
                )
            if self._session.host.result is None:
                self._session.note_end(f"it hung: no heartbeat for {silent_s:.0f} s")
        elif not self._warned:
            self._warned = True
            self._say(f"{problem}; ending it if that lasts for {HANG_S:.0f} s")

    def _silence(self) -> float:
        beat, now = self._session.heartbeat, time.monotonic()
        last_beat = beat.time if beat else None
        state = self._session.host.state()
        # What a job does before its Python runs (`setup`, a container) takes as long as it takes.
        begun = state is State.RUNNING or not self._session.host.on_slurm
        idle = state in (State.QUEUED, State.SUSPENDED) or not begun
        if last_beat != self._last_beat or idle:
            self._last_beat, self._since = last_beat, now
        return now - self._since
