"""The job of a self-test, from the outside: what it is started with, its wait, its end.

    .lockstep/selftest/NNN/     one self-test; its form is that of an attempt
        launch.json worker.json result.json scheduler.json
        settings.json           what is to be measured
        progress.json           the check that it is at
        measured/               what each rank found in each check
        checks/                 what the checks work with; removed at the end
        report.txt report.json  what came out

The job belongs to the command: whatever ends the command, except a kill -9, ends the job, too.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines.base import atomic
from pipelines.base.console import Console, seconds
from pipelines.base.errors import LockstepError
from pipelines.base.processes import end_processes, start_of, this_process
from pipelines.base.repository import Repository
from pipelines.config.params import load_params
from pipelines.config.profiles import (
    EARLIEST_SIGNAL_S,
    ExecutorKind,
    Profile,
    Resources,
    load_profile,
)
from pipelines.driver.executors import make_executor
from pipelines.driver.local_process import start_here
from pipelines.identity.snapshot import take_snapshot
from pipelines.ledger.entry import Attempt
from pipelines.ledger.launch import Launch
from pipelines.ledger.state import State
from pipelines.selftest.finding import Finding, Verdict
from pipelines.selftest.host import COLLECTIVE_S, MODULE
from pipelines.selftest.judge import judge
from pipelines.selftest.report import Report, remove_bulk
from pipelines.selftest.seen import SEE_LOG, Seen
from pipelines.selftest.settings import Settings, done_path, read_measurements, write_settings
from pipelines.slurm.outcome import outcome_here, outcome_of, tail
from pipelines.slurm.scheduler import Scheduler
from pipelines.slurm.script import batch_script
from pipelines.slurm.submit import SUBMIT_AGAIN_S, Pause, slurm_batches, submit_batches
from stages.contracts.base import Processes
from stages.contracts.catalog import STAGES
from stages.contracts.rollout import Engine

NAME = "selftest"
POLL_S = 0.2
LAST_LINES = 3
"""Of a log, in a finding."""
END_S = 30.0
"""How long the other processes may take to end after rank 0."""


def plan_launch(
    repository: Repository,
    profile: str,
    *,
    stage: str | None,
    nodes: int | None,
    tasks_per_node: int | None,
    minutes: int,
) -> tuple[Launch, str]:
    """What the job is started with, and the stage whose resources it has."""
    loaded = load_profile(repository.root, profile)
    stage = _stage(loaded, stage)
    file = f"slurm_profiles/{profile}.yaml"
    resources = _resized(loaded.resources(stage), nodes, tasks_per_node)
    world = resources.nodes * resources.tasks_per_node
    on_slurm = loaded.executor is ExecutorKind.SLURM
    if not on_slurm and resources.nodes > 1:
        raise LockstepError(
            f"--nodes {resources.nodes}: {file} has `executor` {loaded.executor}, which is this "
            "machine alone; choose a profile with `executor: slurm`"
        )
    on_gpus = resources.device != "cpu"
    if on_gpus and not resources.gres and resources.tasks_per_node > resources.gpus_per_node:
        raise LockstepError(
            f"{file}: `device` is {resources.device} and each rank needs a GPU of its own, but "
            f"`tasks_per_node` is {resources.tasks_per_node} and `gpus_per_node` "
            f"{resources.gpus_per_node}: set --tasks-per-node {max(resources.gpus_per_node, 1)}"
        )
    if world % resources.sequence_parallel:
        raise LockstepError(
            f"{file}: `sequence_parallel` {resources.sequence_parallel} does not divide {world} "
            "ranks: choose another --nodes or --tasks-per-node"
        )
    least = (resources.signal_lead_seconds + EARLIEST_SIGNAL_S) // 60 + 1
    limit = max(min(minutes, resources.time_minutes), least) if on_slurm else minutes
    launch = Launch(
        executor=loaded.executor if on_slurm else ExecutorKind.LOCAL,
        module=MODULE,
        profile=profile,
        resources=resources.model_copy(update={"time_minutes": limit, "shards": 1}),
        clone=repository.root,
        root=repository.root,
        code=take_snapshot(repository),
        user=os.getuid(),
        time=time.time(),
        submitter=this_process(),
    )
    return launch, stage


def _stage(profile: Profile, chosen: str | None) -> str:
    """The training stage with the most ranks, unless one was chosen."""
    if chosen is not None and chosen not in STAGES:
        raise LockstepError(f"--stage {chosen}: stages are {', '.join(STAGES)}")

    def num_ranks(stage: str) -> int:
        resources = profile.resources(stage)
        return resources.nodes * resources.tasks_per_node

    trains = [name for name, each in STAGES.items() if each.processes is Processes.TOGETHER]
    return chosen or max(trains, key=num_ranks)


def _resized(resources: Resources, nodes: int | None, tasks: int | None) -> Resources:
    """On as many nodes, and with as many ranks on each, as were asked for."""
    changes: dict[str, Any] = {}
    if nodes:
        changes["nodes"] = nodes
    if tasks:
        changes["tasks_per_node"] = tasks
        if resources.device != "cpu" and resources.gpus_per_node:
            changes["gpus_per_node"] = tasks
    return resources.model_copy(update=changes)


def script(repository: Repository, launch: Launch) -> str:
    """The job script, as it would be submitted."""
    if launch.executor is not ExecutorKind.SLURM:
        return f"# profile {launch.profile} runs it on this machine, without a job script"
    folder = repository.home / NAME / "dry-run"
    (batch,) = slurm_batches(NAME, folder, "dry-run", _once(launch))
    return batch_script(batch)


def _once(launch: Launch) -> Launch:
    """A job that Slurm never starts again: half of two self-tests is none."""
    return replace(launch, resources=launch.resources.model_copy(update={"requeues": 0}))


def run_selftest(
    repository: Repository, launch: Launch, stage: str, console: Console, *, keep: bool
) -> Report:
    """Submit the job, wait for it, and judge what it measured."""
    attempt = _new_folder(repository, launch)
    disks = _disks(repository, attempt.folder)
    uses_vllm = load_params(repository.root).rollout.engine is Engine.VLLM
    write_settings(attempt.folder, Settings(disks, uses_vllm))
    started = time.monotonic()
    with _until_it_ends(repository, attempt) as processes:
        if launch.executor is ExecutorKind.SLURM:
            make_executor(ExecutorKind.SLURM, repository)  # says so where there is no Slurm
            submitted = submit_batches(
                Scheduler(repository),
                NAME,
                attempt.folder,
                attempt.launched,
                pause=_pause(console),
            )
        else:
            submitted = _start_here(attempt, launch, processes)
        attempt.write(submitted)
        where = "job" if attempt.on_slurm else "process"
        console.line(f"{NAME}: {where} {submitted.job}, log in {attempt.folder}")
        _wait(repository, attempt, console, started)
        _wait_for_others(repository, attempt, processes)
    resources = launch.resources
    measured = read_measurements(attempt.folder)
    limit = min(resources.collective_seconds, COLLECTIVE_S)
    findings = [
        *_ended_early(attempt),
        *judge(Seen(measured, resources, launch.executor, limit)),
    ]
    report = Report(
        profile=launch.profile,
        stage=stage,
        job=submitted.job or "?",
        nodes=resources.nodes,
        ranks=launch.tasks_per_job,
        time=launch.time,
        seconds=time.monotonic() - started,
        folder=attempt.folder,
        findings=findings,
        measured=measured,
    )
    report.write(attempt.folder)
    if not keep:
        remove_bulk(attempt.folder)
    for disk in disks.values():
        atomic.remove(Path(disk))
    return report


def _new_folder(repository: Repository, launch: Launch) -> Attempt:
    home = repository.home / NAME
    home.mkdir(parents=True, exist_ok=True)
    number = max((int(path.name) for path in home.glob("[0-9]*")), default=0) + 1
    while True:
        folder = home / f"{number:03}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1  # of another command, at the same moment
            continue
        attempt = Attempt(folder)
        attempt.write(_once(launch))
        return attempt


def _disks(repository: Repository, folder: Path) -> dict[str, str]:
    """A folder to measure on each file system that a job writes to."""
    disks = {".lockstep": str(folder / "disk")}
    artifacts = repository.root / "artifacts"
    if artifacts.exists() and artifacts.stat().st_dev != folder.stat().st_dev:
        disks["artifacts"] = str(artifacts / f".{NAME}-{folder.name}")
    return disks


def _start_here(
    attempt: Attempt, launch: Launch, processes: list[subprocess.Popen[bytes]]
) -> Launch:
    for rank in range(launch.tasks_per_job):
        arguments = [str(attempt.folder), "--rank", str(rank)]
        processes.append(start_here(launch, arguments, attempt.folder / f"host_{rank}_log"))
    pid = processes[0].pid
    return replace(launch, job=str(pid), pid=pid, pid_started=start_of(pid))


def _pause(console: Console) -> Pause:
    def pause(answer: str) -> None:
        console.progress(f"{NAME}: sbatch is tried again: {answer}")
        time.sleep(SUBMIT_AGAIN_S)

    return pause


@contextmanager
def _until_it_ends(
    repository: Repository, attempt: Attempt
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Around submission and wait: whatever ends these ends the job."""
    processes: list[subprocess.Popen[bytes]] = []
    before = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield processes
    except BaseException:
        attempt.mark_cancelled()
        end_processes([process.pid for process in processes])
        if attempt.jobs:
            make_executor(ExecutorKind.SLURM, repository).cancel(attempt)
        remove_bulk(attempt.folder)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(repository: Repository, attempt: Attempt, console: Console, started: float) -> None:
    scheduler = Scheduler(repository)
    launch = attempt.launched
    while (state := attempt.state()).alive:
        scheduler.refresh()
        passed = time.monotonic() - started
        console.progress(f"{NAME}: {_describe(attempt, state)}, {seconds(passed)}")
        if launch.pid and passed > 60 * launch.resources.time_minutes:
            return  # what Slurm does for its jobs
        time.sleep(POLL_S)
    console.clear()


def _describe(attempt: Attempt, state: State) -> str:
    """Where it stands, in words."""
    if state is State.QUEUED:
        reasons = {job.reason for job in attempt.scheduler.jobs.values() if job.reason}
        return f"job {attempt.job} waits in the queue" + (
            f" ({', '.join(sorted(reasons))})" if reasons else ""
        )
    progress = atomic.read_json(attempt.folder / "progress.json")
    if progress is None:
        return "the ranks start"
    return f"check {progress['number']} of {progress['of']}, {progress['check']}"


def _wait_for_others(
    repository: Repository, attempt: Attempt, processes: list[subprocess.Popen[bytes]]
) -> None:
    """Until all ranks have reported, have ended, or have had their time for it."""
    ranks = range(attempt.launched.tasks_per_job)
    deadline = time.monotonic() + (END_S if attempt.result else 0.0)
    while not all(done_path(attempt.folder, rank).exists() for rank in ranks):
        Scheduler(repository).refresh()
        gone = processes and all(process.poll() is not None for process in processes)
        if gone or attempt.scheduler.ended or time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    end_processes([process.pid for process in processes if process.poll() is None])


def _ended_early(attempt: Attempt) -> Iterator[Finding]:
    """That the job did not come to its end, why, and the last lines of its log."""
    if attempt.state() is State.COMPLETED:
        return
    outcome = outcome_of(attempt) if attempt.on_slurm else outcome_here(attempt)
    lines = [line.removeprefix("  | ") for line in tail(attempt, outcome).splitlines()]
    said = "; ".join([line for line in lines if not line.startswith("srun:")][-LAST_LINES:])
    # A self-test has no progress that a second run could go on from.
    remedy = SEE_LOG if "progress is saved" in outcome.advice else outcome.advice
    if attempt.worker is None:
        remedy = "it never started: see `setup`, `container` and `python` in the profile, and "
        remedy += "the logs in the folder below"
    detail = f"{outcome.what} ({said})" if said else outcome.what
    yield Finding("job", Verdict.FAILED, detail, remedy=remedy)
