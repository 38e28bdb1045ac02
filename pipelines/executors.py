"""Who runs a job: a process of its own, this process, or Slurm.

Only the submission differs. How a job fares is read off the ledger, so a driver that comes back
after a death waits for a job that another process submitted exactly as for its own.
"""

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import psutil

from pipelines.errors import LockstepError
from pipelines.ledger import Attempt
from pipelines.processes import end_processes
from pipelines.profiles import ExecutorKind, Resources
from pipelines.worker import run_attempt


class Executor(Protocol):
    """Submits attempts and ends them."""

    def submit(self, attempt: Attempt, resources: Resources) -> dict[str, Any]:
        """Start the job; what it returns is added to the attempt's launch.json."""
        ...

    def cancel(self, attempt: Attempt) -> None:
        """End the job and all its processes, and return when they are gone."""
        ...


class LocalExecutor:
    """submitit's local executor: the job is a process tree of its own that outlives the driver."""

    def submit(self, attempt: Attempt, resources: Resources) -> dict[str, Any]:
        import submitit

        if resources.nodes > 1 or resources.tasks_per_node > 1:
            raise LockstepError(
                "a profile with `executor: local` runs one process a stage: "
                "set nodes and tasks_per_node to 1"
            )
        executor = submitit.LocalExecutor(attempt.folder, python=resources.python)
        executor.update_parameters(
            timeout_min=resources.time_minutes,
            gpus_per_node=resources.gpus_per_node,
            setup=resources.setup,
        )
        root = (attempt.launch or {})["root"]
        # The job imports the code of the clone that it belongs to, and no other installed one.
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        with _blocked_interrupts(), _variables(_threads(resources) | {"PYTHONPATH": path}):
            job = executor.submit(run_attempt, str(attempt.folder))
        pid = int(job.job_id)
        return {"job": job.job_id, "pid": pid, "pid_started": psutil.Process(pid).create_time()}

    def cancel(self, attempt: Attempt) -> None:
        roots = [(attempt.launch or {}).get("pid"), (attempt.worker or {}).get("pid")]
        end_processes([pid for pid in roots if pid])


class DebugExecutor:
    """The job is a function call in this process, so breakpoints work."""

    def submit(self, attempt: Attempt, resources: Resources) -> dict[str, Any]:
        with _variables(_threads(resources)):
            run_attempt(str(attempt.folder))
        return {"job": "in-process"}

    def cancel(self, attempt: Attempt) -> None:
        """Nothing outlives the process."""


def make_executor(kind: ExecutorKind) -> Executor:
    if kind is ExecutorKind.LOCAL:
        return LocalExecutor()
    if kind is ExecutorKind.DEBUG:
        return DebugExecutor()
    raise LockstepError(
        "profiles with `executor: slurm` only render their job scripts for now: "
        "use --dry-run to see them, or run with --profile local"
    )


def render_sbatch(stage: str, folder: Path, resources: Resources) -> str:
    """The sbatch script for a stage, word for word as submitit writes it. Needs no Slurm."""
    from submitit.slurm.slurm import _make_sbatch_string

    python = resources.python or sys.executable
    words = [*shlex.split(resources.container or ""), python]
    extra: dict[str, Any] = {"requeue": True} if resources.requeues else {}
    if resources.reservation:
        extra["reservation"] = resources.reservation
    return str(
        _make_sbatch_string(
            command=f"{shlex.join(words)} -u -m submitit.core._submit {shlex.quote(str(folder))}",
            folder=folder,
            job_name=f"lockstep-{stage}",
            time=resources.time_minutes,
            nodes=resources.nodes,
            ntasks_per_node=resources.tasks_per_node,
            cpus_per_task=resources.cpus_per_task,
            gpus_per_node=resources.gpus_per_node or None,
            mem=resources.memory,
            partition=resources.partition,
            account=resources.account,
            qos=resources.qos,
            constraint=resources.constraint,
            exclude=resources.exclude,
            gres=resources.gres,
            signal_delay_s=resources.signal_lead_seconds,
            # A failing set-up line must end the job instead of running the stage without it.
            setup=["set -e", *resources.setup] if resources.setup else None,
            additional_parameters={**extra, **resources.extra},
            # srun does not inherit --cpus-per-task from sbatch in every release.
            srun_args=[f"--cpus-per-task={resources.cpus_per_task}", "--kill-on-bad-exit=1"],
        )
    )


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
