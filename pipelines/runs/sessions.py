"""Start and end sessions: a process, or a job on Slurm, that serves stage after stage."""

import math
import os
import re
import sys
import time
from dataclasses import replace

from pipelines.base.console import Console
from pipelines.base.errors import LockstepError
from pipelines.base.processes import start_of, this_process
from pipelines.base.repository import Repository
from pipelines.config.chosen_profile import profile_name
from pipelines.config.profiles import (
    ExecutorKind,
    Profile,
    Resources,
    bytes_of,
    load_profile,
    processes_of,
)
from pipelines.driver.executors import STOP_S, end_host, make_executor
from pipelines.driver.local_process import start_here
from pipelines.identity.snapshot import take_snapshot
from pipelines.ledger.launch import Launch
from pipelines.slurm.scheduler import Scheduler
from pipelines.slurm.script import batch_script
from pipelines.slurm.submit import just_wait, slurm_batches, submit_batches
from pipelines.worker.session import HOST_MODULE, Session, living, misfit, new_session, sessions
from stages.contracts.base import Processes
from stages.contracts.catalog import STAGES


def plan_launch(
    repository: Repository,
    name: str,
    profile: str | None,
    names: list[str],
    *,
    idle_minutes: float,
    minutes: int | None,
) -> Launch:
    """What a session is started with; says which of the stages it would not serve, and why."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        raise LockstepError(f"--name {name!r}: letters, digits, - and _ only")
    if idle_minutes <= 0:
        raise LockstepError(f"--idle-minutes {idle_minutes}: must be more than 0")
    profile = profile_name(profile)
    loaded = load_profile(repository.root, profile)
    if loaded.executor is ExecutorKind.DEBUG:
        raise LockstepError(f"profile {profile} runs stages in the command's own process")
    resources, left_out = choose_resources(loaded, names)
    served = [each for each in names if each not in left_out]
    for each, why in left_out.items():
        print(f"{each} is not served: {why}", file=sys.stderr)
    if not served:
        raise LockstepError(f"profile {profile}: a session would serve none of {', '.join(names)}")
    changes = {"requeues": 0}
    if minutes:
        changes["time_minutes"] = minutes
    return Launch(
        executor=loaded.executor,
        module=HOST_MODULE,
        profile=profile,
        stages=tuple(served),
        idle_minutes=idle_minutes,
        resources=Resources.model_validate({**resources.model_dump(), **changes}),
        clone=repository.root,
        root=repository.root,
        code=take_snapshot(repository),
        user=os.getuid(),
        time=time.time(),
    )


def choose_resources(profile: Profile, names: list[str]) -> tuple[Resources, dict[str, str]]:
    """What the session gets: as the neediest of its stages; and which stages that does not fit."""
    if unknown := [name for name in names if name not in STAGES]:
        raise LockstepError(f"--stages {', '.join(unknown)}: stages are {', '.join(STAGES)}")
    wants = {name: profile.resources(name) for name in names}
    shards = {
        name: each.shards if _may_be_sharded(profile, name) else 1 for name, each in wants.items()
    }
    alone = [name for name, each in wants.items() if not misfit(each, each, shards[name])] or names[
        :1
    ]
    if not alone:
        raise LockstepError("--stages names no stage")
    neediest = wants[max(alone, key=lambda name: _need(wants[name]))]
    why = {name: misfit(neediest, each, shards[name]) for name, each in wants.items()}
    memories = [wants[name].memory for name in names if not why[name]]
    # None, and Slurm's 0, are no limit of ours.
    memory = max(memories, key=lambda each: bytes_of(each) or math.inf, default=neediest.memory)
    largest = neediest.model_copy(update={"memory": memory})
    return largest, {name: reason for name, reason in why.items() if reason}


def _may_be_sharded(profile: Profile, name: str) -> bool:
    on_slurm = profile.executor is ExecutorKind.SLURM
    return on_slurm and processes_of(STAGES[name], profile.resources(name)) is Processes.SHARDS


def _need(resources: Resources) -> tuple[int, int, int]:
    return resources.gpus_per_node, resources.cpus_per_task, resources.time_minutes


def up(repository: Repository, name: str, launch: Launch) -> Session:
    """Start the process, or submit the job, of a new session."""
    Scheduler(repository).refresh(now=True)
    for other in living(repository):
        if other.name == name:
            raise LockstepError(
                f"session {other.label} is up already; `lockstep session down {name}` ends it, "
                "--name gives this one another name"
            )
    session = new_session(repository, name, replace(launch, submitter=this_process()))
    try:
        if launch.executor is ExecutorKind.SLURM:
            make_executor(ExecutorKind.SLURM, repository)  # says so where there is no Slurm
            submitted = submit_batches(
                Scheduler(repository), f"session-{name}", session.folder, launch, pause=just_wait
            )
        else:
            submitted = _start_here(session, launch)
    except BaseException as error:
        session.note_end(f"it could not be started: {error}")
        raise
    session.host.write(submitted)
    return session


def _start_here(session: Session, launch: Launch) -> Launch:
    pid = start_here(launch, [str(session.folder)], session.folder / "host_0_log").pid
    return replace(launch, job=str(pid), pid=pid, pid_started=start_of(pid))


def script(repository: Repository, name: str, launch: Launch) -> str:
    if launch.executor is not ExecutorKind.SLURM:
        return f"# profile {launch.profile} runs it on this machine, without a job script"
    folder = repository.home / "sessions" / name / "dry-run"
    (batch,) = slurm_batches(f"session-{name}", folder, "dry-run", launch)
    return batch_script(batch)


def down(repository: Repository, names: list[str], console: Console) -> None:
    """End these sessions, or all: at once if they are idle, else at a step boundary."""
    Scheduler(repository).refresh(now=True)
    found = [session for session in sessions(repository) if session.host.result is None]
    if unknown := set(names) - {session.name for session in found}:
        known = ", ".join(session.name for session in found) or "none"
        raise LockstepError(f"no session {', '.join(sorted(unknown))} is up; up: {known}")
    chosen = [session for session in found if not names or session.name in names]
    for session in chosen:
        session.request_end()
    for session in chosen:
        if not _wait_for_end(repository, session) and not end_host(repository, session):
            raise LockstepError(f"session {session.label} does not end: see squeue")
        if session.host.result is None:
            session.note_end("it was told to end")
        console.line(f"session {session.label} has ended")
    if not chosen:
        console.line("no session is up")


def _wait_for_end(repository: Repository, session: Session) -> bool:
    """Whether it ended by itself; one that Slurm has not started cannot."""
    deadline = time.monotonic() + STOP_S
    while session.host.state().alive and time.monotonic() < deadline:
        if session.host.worker is None:
            return False
        Scheduler(repository).refresh()
        time.sleep(0.1)
    return not session.host.state().alive
