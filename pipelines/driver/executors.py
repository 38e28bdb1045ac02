"""Who runs a job: a process of its own, this process, Slurm, or a session that is up.

Only the submission differs. How a job fares is read off the ledger, so a driver that comes back
after a death waits for a job that another process submitted exactly as for its own.
"""

import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from pipelines.base.errors import LockstepError
from pipelines.base.processes import end_processes, start_of
from pipelines.base.repository import Repository
from pipelines.config.profiles import ExecutorKind, thread_variables
from pipelines.ledger import mailbox
from pipelines.ledger.entry import Attempt
from pipelines.ledger.launch import Launch
from pipelines.slurm.queue import SlurmSilent
from pipelines.slurm.scheduler import Scheduler
from pipelines.slurm.submit import Pause, submit_batches
from pipelines.warm.jobs import fork_job
from pipelines.worker.session import Session

CANCEL_S = 60.0
"""How long Slurm may take to end a job."""
STOP_S = 60.0
"""How long an attempt in a session may take to its next step boundary."""
POLL_S = 0.1


class Executor:
    """Submits attempts and ends them.

    What is not overridden is that of jobs on this machine: their own files and locks tell all there
    is to know.
    """

    def submit(self, attempt: Attempt, pause: Pause) -> Launch:
        """Start the job; the attempt's launch, with its job."""
        raise NotImplementedError

    def cancel(self, attempt: Attempt) -> bool:
        """End the job and all its processes; whether they are gone when it returns."""
        raise NotImplementedError

    def never_had(self, attempt: Attempt) -> bool:  # noqa: ARG002
        """Whether nobody submitted it, and nobody is about to, though its files do not tell."""
        return False

    def leaves_jobs(self, attempt: Attempt) -> bool:  # noqa: ARG002
        """Whether the job is at home elsewhere, so that it goes on when its driver's host ends."""
        return False

    def refresh(self, *, now: bool = False) -> None:
        """Bring the attempts' files up to date with what the world knows about their jobs."""

    def trouble(self) -> str | None:
        """What stands in the way of knowing, if anything does."""
        return None


class LocalExecutor(Executor):
    """The job is a process tree of its own that outlives the driver.

    It is forked from one that has imported everything; where none is to be had, or the profile has
    lines for a shell, submitit's local executor starts it.
    """

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    def submit(self, attempt: Attempt, pause: Pause) -> Launch:  # noqa: ARG002
        launch = attempt.launched
        resources = launch.resources
        if forked := fork_job(self._repository, attempt, resources):
            pid, started = forked.pid, forked.started
        else:
            pid = _submit_locally(attempt, launch)
            started = start_of(pid)
        return replace(launch, job=str(pid), pid=pid, pid_started=started)

    def cancel(self, attempt: Attempt) -> bool:
        roots = [each.pid for each in (attempt.launch, attempt.worker) if each]
        end_processes([pid for pid in roots if pid])
        return True


def _submit_locally(attempt: Attempt, launch: Launch) -> int:
    import submitit

    from pipelines.worker.worker import run_attempt

    resources = launch.resources
    executor = submitit.LocalExecutor(attempt.folder, python=resources.python)
    executor.update_parameters(
        timeout_min=resources.time_minutes,
        gpus_per_node=resources.gpus_per_node,
        setup=resources.setup,
    )
    # The job imports the code as it is now, and no other: not that of the folder it starts in.
    code = {"PYTHONPATH": str(launch.code), "PYTHONSAFEPATH": "1"}
    with _blocked_interrupts(), _variables(thread_variables(resources) | code):
        job = executor.submit(run_attempt, str(attempt.folder))
    return int(job.job_id)


class DebugExecutor(Executor):
    """The job is a function call in this process, so breakpoints work."""

    def submit(self, attempt: Attempt, pause: Pause) -> Launch:  # noqa: ARG002
        from pipelines.worker.worker import run_attempt

        launch = attempt.launched
        with _variables(thread_variables(launch.resources)):
            run_attempt(str(attempt.folder))
        return replace(launch, job="in-process")

    def cancel(self, attempt: Attempt) -> bool:  # noqa: ARG002
        return True  # nothing outlives the process


class _WithScheduler(Executor):
    """Jobs of which Slurm has to be asked."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._scheduler = Scheduler(repository)

    def refresh(self, *, now: bool = False) -> None:
        self._scheduler.refresh(now=now)

    def trouble(self) -> str | None:
        return self._scheduler.silence()


class SlurmExecutor(_WithScheduler):
    """Jobs on Slurm: submitted by submitit, followed and cancelled by Slurm's own commands."""

    def submit(self, attempt: Attempt, pause: Pause) -> Launch:
        return submit_batches(
            self._scheduler, attempt.entry.stage, attempt.folder, attempt.launched, pause=pause
        )

    def cancel(self, attempt: Attempt) -> bool:
        """Until the jobs are gone, or Slurm takes longer than anybody wants to wait."""
        deadline = time.monotonic() + CANCEL_S
        later = _successors(attempt)
        for each in later:
            each.mark_cancelled()
        while time.monotonic() < deadline:
            with suppress(SlurmSilent):
                # Successors first: they start when this one has ended.
                self._scheduler.cancel([job for each in (*later, attempt) for job in each.jobs])
                self._scheduler.refresh(now=True)
                if all(each.scheduler.ended for each in (*later, attempt) if each.jobs):
                    return True
            time.sleep(1.0)
        return False

    def never_had(self, attempt: Attempt) -> bool:
        if not attempt.state().alive or attempt.jobs or attempt.is_being_submitted():
            return False
        return not self._scheduler.tokens_of([attempt.folder])

    def leaves_jobs(self, attempt: Attempt) -> bool:  # noqa: ARG002
        return True


def _successors(attempt: Attempt) -> list[Attempt]:
    """Of a job in a chain: those that wait to go on if it is ended early, the last one first."""
    successor = attempt.successor
    return [*_successors(successor), successor] if successor else []


class SessionExecutor(_WithScheduler):
    """Posts attempts to a session, and takes them back.

    An attempt is ended at a step boundary, so that the session lives on with what it keeps in
    memory; one that does not come to such a boundary in time takes the session with it.
    """

    def submit(self, attempt: Attempt, pause: Pause) -> Launch:  # noqa: ARG002
        session, launch = session_of(attempt), attempt.launched
        mailbox.post(session.folder, attempt.folder, launch.code)
        return replace(launch, job=session.label)

    def cancel(self, attempt: Attempt) -> bool:
        session = session_of(attempt)
        if mailbox.withdraw(session.folder, attempt.folder):
            return True
        deadline = time.monotonic() + STOP_S
        while attempt.state().alive and time.monotonic() < deadline:
            self.refresh()
            time.sleep(POLL_S)
        return not attempt.state().alive or end_host(self._repository, session)

    def leaves_jobs(self, attempt: Attempt) -> bool:
        return session_of(attempt).host.on_slurm


def session_of(attempt: Attempt) -> Session:
    """The session that an attempt was posted to."""
    folder = attempt.launched.session
    assert folder is not None
    return Session(folder)


def end_host(repository: Repository, session: Session) -> bool:
    """End the process of a session whatever it does; whether it is gone."""
    if session.host.on_slurm:
        return SlurmExecutor(repository).cancel(session.host)
    worker = session.host.worker
    if worker and worker.host != socket.gethostname():
        raise LockstepError(f"session {session.label} runs on {worker.host}: end it there")
    pids = {worker.pid if worker else None, session.launch.pid}
    with suppress(ProcessLookupError):
        if session.host.state().alive:
            end_processes([pid for pid in pids if pid])
    return not session.host.state().alive


def make_executor(kind: ExecutorKind, repository: Repository) -> Executor:
    if kind is ExecutorKind.LOCAL:
        return LocalExecutor(repository)
    if kind is ExecutorKind.DEBUG:
        return DebugExecutor()
    if kind is ExecutorKind.SESSION:
        return SessionExecutor(repository)
    if shutil.which("sbatch") is None:
        raise LockstepError(
            "there is no sbatch on this machine: profiles with `executor: slurm` need a login node "
            "of a cluster. `--dry-run` shows the job scripts anywhere; `make slurm-up` starts a "
            "small cluster on this machine"
        )
    return SlurmExecutor(repository)


@contextmanager
def _blocked_interrupts() -> Iterator[None]:
    """Start children that a Ctrl-C in the terminal does not reach; here it waits until after."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that are started in here."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
