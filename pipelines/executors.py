"""Who runs a job: a process of its own, this process, or Slurm.

Only the submission differs. How a job fares is read off the ledger, so a driver that comes back
after a death waits for a job that another process submitted exactly as for its own.
"""

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import psutil

from pipelines.errors import LockstepError
from pipelines.ledger import Attempt
from pipelines.processes import end_processes
from pipelines.profiles import ExecutorKind, Resources
from pipelines.redact import redact
from pipelines.repository import Repository
from pipelines.scheduler import Scheduler
from pipelines.slurm_queue import SlurmSilent, cancel_jobs, max_array_size, my_jobs
from pipelines.slurm_script import Batch, command_of, parameters_of
from pipelines.worker import run_attempt

Pause = Callable[[str], None]
"""Called with what Slurm said before sbatch is tried again; may give up by raising."""
CANCEL_S = 60.0
SUBMIT_S, SUBMIT_AGAIN_S = 600.0, 3.0
_PASSING = re.compile(r"contact slurm controller|timed out|temporarily|Zero Bytes", re.IGNORECASE)
"""What sbatch says when the controller is away, not when it refuses."""


class Executor(Protocol):
    """Submits attempts and ends them."""

    def submit(self, attempt: Attempt, pause: Pause) -> dict[str, Any]:
        """Start the job; what it returns is added to the attempt's launch.json."""
        ...

    def cancel(self, attempt: Attempt) -> bool:
        """End the job and all its processes; whether they are gone when it returns."""
        ...

    @property
    def leaves_jobs(self) -> bool:
        """Whether jobs are at home elsewhere, so that they go on when their driver's host ends."""
        ...

    def look(self, *, now: bool = False) -> None:
        """Bring the attempts' files up to date with what the world knows about their jobs."""
        ...

    def trouble(self) -> str | None:
        """What stands in the way of knowing, if anything does."""
        ...


class _OnThisMachine:
    """Jobs whose own files and locks tell all there is to know."""

    leaves_jobs = False

    def look(self, *, now: bool = False) -> None:
        """The files are up to date by themselves."""

    def trouble(self) -> str | None:
        return None


class LocalExecutor(_OnThisMachine):
    """submitit's local executor: the job is a process tree of its own that outlives the driver."""

    def submit(self, attempt: Attempt, pause: Pause) -> dict[str, Any]:  # noqa: ARG002
        import submitit

        resources = resources_of(attempt)
        executor = submitit.LocalExecutor(attempt.folder, python=resources.python)
        executor.update_parameters(
            timeout_min=resources.time_minutes,
            gpus_per_node=resources.gpus_per_node,
            setup=resources.setup,
        )
        # The job imports the code as it is now, and no other: not that of the folder it starts in.
        code = {"PYTHONPATH": (attempt.launch or {})["code"], "PYTHONSAFEPATH": "1"}
        with _blocked_interrupts(), _variables(_threads(resources) | code):
            job = executor.submit(run_attempt, str(attempt.folder))
        pid = int(job.job_id)
        return {"job": job.job_id, "pid": pid, "pid_started": psutil.Process(pid).create_time()}

    def cancel(self, attempt: Attempt) -> bool:
        roots = [(attempt.launch or {}).get("pid"), (attempt.worker or {}).get("pid")]
        end_processes([pid for pid in roots if pid])
        return True


class DebugExecutor(_OnThisMachine):
    """The job is a function call in this process, so breakpoints work."""

    def submit(self, attempt: Attempt, pause: Pause) -> dict[str, Any]:  # noqa: ARG002
        with _variables(_threads(resources_of(attempt))):
            run_attempt(str(attempt.folder))
        return {"job": "in-process"}

    def cancel(self, attempt: Attempt) -> bool:  # noqa: ARG002
        return True  # nothing outlives the process


class SlurmExecutor:
    """submitit's Slurm executor: sbatch, and Slurm does the rest."""

    leaves_jobs = True

    def __init__(self, repository: Repository) -> None:
        self._scheduler = Scheduler(repository)

    def submit(self, attempt: Attempt, pause: Pause) -> dict[str, Any]:
        return submit_batches(
            self._scheduler, attempt.entry.stage, attempt.folder, attempt.launch or {}, pause=pause
        )

    def look(self, *, now: bool = False) -> None:
        self._scheduler.look(now=now)

    def trouble(self) -> str | None:
        return self._scheduler.silence()

    def cancel(self, attempt: Attempt) -> bool:
        """Until the jobs are gone, or Slurm takes longer than anybody wants to wait."""
        deadline = time.monotonic() + CANCEL_S
        while time.monotonic() < deadline:
            with suppress(SlurmSilent):
                cancel_jobs(attempt.jobs)
                self._scheduler.look(now=True)
                if (attempt.scheduler or {}).get("ended"):
                    return True
            time.sleep(1.0)
        return False


def slurm_batches(
    stage: str, folder: Path, token: str, launch: Mapping[str, Any], after: Sequence[str] = ()
) -> list[Batch]:
    """The calls of sbatch that a submission needs: one, or several where an array is too large."""
    resources = Resources.model_validate(launch["resources"])
    clone, code = Path(launch["clone"]), Path(launch["code"])
    whole = Batch(stage, folder, resources, token, code, clone, after=after)
    shards = launch.get("shards")
    if shards is None:
        return [whole]
    largest = max_array_size()
    chunks: dict[int, list[int]] = {}
    for shard in shards:
        chunks.setdefault(shard // largest, []).append(shard)
    parallelism = -(-resources.array_parallelism // len(chunks))
    return [
        replace(whole, shards=chunk, first_shard=number * largest, parallelism=parallelism)
        for number, chunk in chunks.items()
    ]


def resources_of(attempt: Attempt) -> Resources:
    return Resources.model_validate((attempt.launch or {})["resources"])


def submit_batches(
    scheduler: Scheduler,
    stage: str,
    folder: Path,
    launch: Mapping[str, Any],
    *,
    after: Sequence[str] = (),
    pause: Pause,
) -> dict[str, Any]:
    """Make a submission, all of it or none; what is to be noted about it in launch.json."""
    token = scheduler.register(folder)
    jobs: list[str] = []
    try:
        for batch in slurm_batches(stage, folder, token, launch, after):
            jobs.append(submit_batch(batch, known=jobs, pause=pause))
    except BaseException:
        scheduler.withdraw(token)
        with suppress(SlurmSilent):
            cancel_jobs(jobs)
        raise
    scheduler.submitted(token, folder)
    return {"job": ",".join(jobs), "jobs": jobs, "token": token}


def submit_batch(batch: Batch, *, known: Sequence[str] = (), pause: Pause) -> str:
    """Hand one script to sbatch; the number of the job.

    While slurmctld is away, sbatch is tried again, unless its last try did arrive: then Slurm
    shows a job with this token that is not among those `known`.
    """
    from submitit import SlurmExecutor as Submitit
    from submitit.core.utils import FailedJobError

    executor = Submitit(batch.folder)
    executor.parameters = parameters_of(batch)
    deadline = time.monotonic() + SUBMIT_S
    while True:
        try:
            with _environment_of_jobs():
                return str(executor._submit_command(command_of(batch)).job_id)
        except FailedJobError as error:
            said = redact(str(error).strip())
        if not _PASSING.search(said) or time.monotonic() > deadline:
            raise LockstepError(
                f"{batch.stage}: sbatch refused the job: {said}\n"
                "see partition, account, qos, time_minutes and the like in the profile, and "
                "`sinfo`; `--dry-run` shows the script"
            )
        pause(said.splitlines()[-1])
        with suppress(SlurmSilent):
            arrived = {job.number for job in my_jobs() if job.comment == batch.comment}
            if arrived - set(known):
                return (arrived - set(known)).pop()


def just_wait(_: str) -> None:
    """A pause in which nobody has to be heeded."""
    time.sleep(SUBMIT_AGAIN_S)


def make_executor(kind: ExecutorKind, repository: Repository) -> Executor:
    if kind is ExecutorKind.LOCAL:
        return LocalExecutor()
    if kind is ExecutorKind.DEBUG:
        return DebugExecutor()
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


def _threads(resources: Resources) -> dict[str, str]:
    """The numerical libraries read their number of threads when they are imported."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return dict.fromkeys(names, str(resources.cpus_per_task))


_STAYS_HERE = ("MLFLOW_", "PREFECT_", "DVC_", "LOCKSTEP_", "SLURM_")
"""sbatch hands the whole environment to the job: what only the control plane needs stays behind,
credentials above all, and so does what describes a job that this process may itself run in."""


@contextmanager
def _environment_of_jobs() -> Iterator[None]:
    before = dict(os.environ)
    for name in before:
        if name.startswith(_STAYS_HERE) and name != "SLURM_CONF":
            del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(before)


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
