"""Inside a job that runs: commands in its allocation, as a step beside those of the stage.

Such a step shares the job's cores, memory and GPUs with the stage, and the job goes on after it. It
begins as the stage's own processes do: in the same folder, after the profile's `setup`, and inside
its `container`.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.ledger.entry import Attempt, Ledger
from pipelines.ledger.launch import Launch
from pipelines.slurm.queue import ask, number_of
from pipelines.slurm.scheduler import Scheduler

NO_SRUN = "there is no srun on this machine: use one that has Slurm's commands"


@dataclass(frozen=True)
class RunningJob:
    """A job of this clone that Slurm says is running."""

    stage: str
    job: str
    """As people know it: 7, or 7_0 for a task of an array."""
    nodes: str
    """As Slurm writes it: node[01-04]."""
    launch: Launch


def running_jobs(repository: Repository) -> list[RunningJob]:
    """Those on Slurm, in the order of their stages and numbers."""
    Scheduler(repository).refresh(now=True)
    return [
        job
        for entry in Ledger(repository.jobs).entries()
        if entry.state().alive
        for job in _jobs_of(entry.stage, entry.attempts()[-1])
    ]


def _jobs_of(stage: str, attempt: Attempt) -> list[RunningJob]:
    submitted = attempt.session or attempt
    if not submitted.on_slurm:
        return []
    return [
        RunningJob(stage, job.id, job.nodes, submitted.launched)
        for _, job in sorted(attempt.scheduler.jobs.items())
        if job.state == "RUNNING"
    ]


def the_job_of(repository: Repository, stage: str, wanted: str | None = None) -> RunningJob:
    """The job of a stage that runs on Slurm; of an array, the first task or the one asked for."""
    running = [job for job in running_jobs(repository) if job.stage == stage]
    if wanted is not None:
        chosen = [job for job in running if wanted in (job.job, job.job.partition("_")[2])]
        if running and not chosen:
            known = ", ".join(job.job for job in running)
            raise LockstepError(f"{stage} has no running job {wanted}; it has {known}")
        running = chosen
    if running:
        return running[0]
    entry = Ledger(repository.jobs).latest(stage).get(stage)
    if entry is None:
        raise LockstepError(f"no job of {stage!r} is known here; see `lockstep status`")
    last = entry.attempts()[-1] if entry.attempts() else None
    if entry.state().alive and last and not (last.session or last).on_slurm:
        raise LockstepError(f"{stage} runs on this machine, not in a job of Slurm's")
    raise LockstepError(f"no job of {stage} runs on Slurm now: it is {entry.state()}")


def step_command(
    job: RunningJob, words: Sequence[str], flags: Sequence[str], *, outside: bool = False
) -> list[str]:
    """What runs these words in the job's allocation; `outside` leaves setup and container out."""
    resources = job.launch.resources
    head = [
        "srun",
        # Steps are made by a job's own number, which for a task of an array is not in its name.
        f"--jobid={number_of(job.job)}",
        "--overlap",
        "--cpus-per-task=1",
        "--export=ALL",
        f"--chdir={job.launch.root}",
        *flags,
    ]
    if outside:
        return [*head, *words]
    script = "\n".join(["set -e", *resources.setup, 'exec "$@"'])
    inner = [*shlex.split(resources.container or ""), *words]
    return [*head, *resources.srun, "bash", "-c", script, "bash", *inner]


def run_inside(job: RunningJob, words: Sequence[str], node: str | None, *, outside: bool) -> int:
    """A command, or without one a shell, as one process on one node; its exit status."""
    flags = ["--nodes=1", "--ntasks=1", *([f"--nodelist={node}"] if node else [])]
    if not words:
        words, flags = ["bash", "-i"], [*flags, "--pty"]
    command = step_command(job, words, flags, outside=outside)
    try:
        return subprocess.run(command, check=False).returncode
    except FileNotFoundError:
        raise LockstepError(NO_SRUN) from None


def usage_of(job: RunningJob) -> list[dict[str, Any]]:
    """What the job uses on each of its nodes now, as pipelines.slurm.usage says it."""
    resources = job.launch.resources
    words = [resources.python or sys.executable, "-m", "pipelines.slurm.usage"]
    command = step_command(job, words, [f"--nodes={resources.nodes}", "--ntasks-per-node=1"])
    try:
        said = ask(command, PYTHONPATH=str(Path(__file__).parents[2]))
    except LookupError:
        raise LockstepError(f"job {job.job} has just ended") from None
    rows = (line for line in said.splitlines() if line.startswith("{"))
    return sorted(map(json.loads, rows), key=lambda row: str(row["host"]))
