"""Who runs a job: a process of its own, this process, Slurm, or a session that is up.

Only the submission differs. How a job fares is read off the ledger, so a driver that comes back
after a death waits for a job that another process submitted exactly as for its own.
"""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from pipelines.base.errors import LockstepError
from pipelines.base.processes import end_processes, start_of
from pipelines.base.repository import Repository
from pipelines.config.profiles import ExecutorKind
from pipelines.config.threads import thread_variables
from pipelines.driver.session_executor import SessionExecutor
from pipelines.driver.slurm_executor import SlurmExecutor
from pipelines.ledger.entry import Attempt
from pipelines.ledger.launch import Launch
from pipelines.slurm.submit import Pause
from pipelines.warm.jobs import fork_job


class Executor(Protocol):
    """Submits attempts and ends them."""

    def submit(self, attempt: Attempt, pause: Pause) -> Launch:
        """Start the job; the attempt's launch, with its job."""
        ...

    def cancel(self, attempt: Attempt) -> bool:
        """End the job and all its processes; whether they are gone when it returns."""
        ...

    def never_had(self, attempt: Attempt) -> bool:
        """Whether nobody submitted it, and nobody is about to, though its files do not tell."""
        ...

    def leaves_jobs(self, attempt: Attempt) -> bool:
        """Whether the job is at home elsewhere, so that it goes on when its driver's host ends."""
        ...

    def refresh(self, *, now: bool = False) -> None:
        """Bring the attempts' files up to date with what the world knows about their jobs."""
        ...

    def trouble(self) -> str | None:
        """What stands in the way of knowing, if anything does."""
        ...


class _OnThisMachine:
    """Jobs whose own files and locks tell all there is to know."""

    def leaves_jobs(self, attempt: Attempt) -> bool:  # noqa: ARG002
        return False

    def never_had(self, attempt: Attempt) -> bool:  # noqa: ARG002
        return False

    def refresh(self, *, now: bool = False) -> None:
        """The files are up to date by themselves."""

    def trouble(self) -> str | None:
        return None


class LocalExecutor(_OnThisMachine):
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


class DebugExecutor(_OnThisMachine):
    """The job is a function call in this process, so breakpoints work."""

    def submit(self, attempt: Attempt, pause: Pause) -> Launch:  # noqa: ARG002
        from pipelines.worker.worker import run_attempt

        launch = attempt.launched
        with _variables(thread_variables(launch.resources)):
            run_attempt(str(attempt.folder))
        return replace(launch, job="in-process")

    def cancel(self, attempt: Attempt) -> bool:  # noqa: ARG002
        return True  # nothing outlives the process


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
