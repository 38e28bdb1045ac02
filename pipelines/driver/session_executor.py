"""A session as one of those who run jobs: an attempt is posted to it instead of being started.

An attempt in it is ended at a step boundary, so that the session lives on with what it keeps in
memory; one that does not come to such a boundary in time takes the session with it.
"""

import time
from contextlib import suppress
from dataclasses import replace

from pipelines.base.errors import LockstepError
from pipelines.base.processes import end_processes
from pipelines.base.repository import Repository
from pipelines.driver.slurm_executor import SlurmExecutor
from pipelines.ledger import mailbox
from pipelines.ledger.entry import Attempt
from pipelines.ledger.launch import Launch
from pipelines.slurm.scheduler import Scheduler
from pipelines.slurm.submit import Pause
from pipelines.worker.session import Session, is_here

STOP_S = 60.0
"""How long an attempt may take to its next step boundary."""
POLL_S = 0.1


class SessionExecutor:
    """Posts attempts, and takes them back."""

    def __init__(self, repository: Repository, stop_s: float = STOP_S) -> None:
        self._repository = repository
        self._scheduler = Scheduler(repository)
        self._stop_s = stop_s

    def submit(self, attempt: Attempt, pause: Pause) -> Launch:  # noqa: ARG002
        session, launch = session_of(attempt), attempt.launched
        mailbox.post(session.folder, attempt.folder, launch.code)
        return replace(launch, job=session.label)

    def cancel(self, attempt: Attempt) -> bool:
        session = session_of(attempt)
        if mailbox.withdraw(session.folder, attempt.folder):
            return True
        deadline = time.monotonic() + self._stop_s
        while attempt.state().alive and time.monotonic() < deadline:
            self.refresh()
            time.sleep(POLL_S)
        return not attempt.state().alive or end_host(self._repository, session)

    def never_had(self, attempt: Attempt) -> bool:  # noqa: ARG002
        return False  # the mailbox tells

    def leaves_jobs(self, attempt: Attempt) -> bool:
        session = attempt.session
        return session is not None and session.on_slurm

    def refresh(self, *, now: bool = False) -> None:
        self._scheduler.refresh(now=now)

    def trouble(self) -> str | None:
        return self._scheduler.silence()


def end_host(repository: Repository, session: Session) -> bool:
    """End the process of a session whatever it does; whether it is gone."""
    if session.host.on_slurm:
        return SlurmExecutor(repository).cancel(session.host)
    worker = session.host.worker
    if worker and not is_here(session):
        raise LockstepError(f"session {session.label} runs on {worker.host}: end it there")
    pids = {worker.pid if worker else None, session.launch.pid}
    with suppress(ProcessLookupError):
        if session.host.state().alive:
            end_processes([pid for pid in pids if pid])
    return not session.host.state().alive


def session_of(attempt: Attempt) -> Session:
    """The session that an attempt was posted to."""
    folder = attempt.launched.session
    assert folder is not None
    return Session(folder)
