"""The job of a self-test, from the inside: one process a rank, which forks a child for every check.

It imports everything once, touches no GPU and meets nobody; its children do. So a child that dies,
is killed for the sake of a check or hangs leaves the next one as it was. Each child writes what it
measured; where it cannot, this process writes how it ended.
"""

import argparse
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from pipelines.base import atomic
from pipelines.base.console import say_anything
from pipelines.base.imports import uncollected
from pipelines.base.locks import hold_lock
from pipelines.base.redact import RedactedStream, redact
from pipelines.base.redacted_log import close_to_others
from pipelines.config.profiles import ExecutorKind
from pipelines.ledger.entry import Attempt
from pipelines.ledger.launch import Launch
from pipelines.ledger.reports import Result, Worker
from pipelines.ledger.state import State
from pipelines.ledger.task import Task, find_task
from pipelines.selftest import disk, machine
from pipelines.selftest.settings import (
    WORDS,
    Measurement,
    Settings,
    done_path,
    measured_path,
    read_settings,
    write_measurement,
)
from pipelines.worker.rendezvous import among_ranks
from stages.context import Context, ShareDone
from stages.contracts.base import Processes
from stages.contracts.rollout import Engine
from stages.contracts.sharding import Offload, Sharding
from stages.engines.processes import determinism
from stages.engines.processes.node import node_name

MODULE = "pipelines.selftest.host"
COLLECTIVE_S = 60.0
"""Longest time that ranks wait in a collective here, if the profile has no shorter one."""
MEET_S = 240.0
"""How long a rank may be busy with the check before."""
LIMIT_S = 600.0
"""How long a check may take at most."""
POLL_S = 0.02


@dataclass(frozen=True)
class Job:
    """One rank of the job."""

    folder: Path
    launch: Launch
    settings: Settings
    task: Task
    node: str

    def folder_of(self, name: str) -> Path:
        folder = self.folder / "checks" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def base(self) -> Path:
        return self.folder / "checks" / "base"

    def context(self, name: str, heartbeats: str, *, checkpoint_seconds: float) -> Context:
        resources = self.launch.resources
        return Context(
            stage="selftest",
            key=None,
            seed=0,
            folder=self.folder_of(name),
            device=self.task.device(resources),
            micro_tokens=resources.micro_tokens,
            checkpoint_activations=resources.checkpoint_activations,
            sharding=resources.sharding,
            offload=resources.offload,
            sequence_parallel=resources.sequence_parallel,
            generator_memory=min(resources.generator_memory, 0.5),
            checkpoint_seconds=checkpoint_seconds,
            rank=self.task.rank,
            world=self.task.world,
            collective_seconds=min(resources.collective_seconds, COLLECTIVE_S),
            heartbeats=self.folder_of(heartbeats) / "heartbeats",
        )

    def write(self, check: str, started: float, **values: Any) -> None:
        measurement = Measurement(
            check=check,
            rank=self.task.rank,
            node=self.node,
            seconds=time.monotonic() - started,
            **values,
        )
        write_measurement(self.folder, measurement)


Measure = Callable[[Job, Context, Any], dict[str, Any]]


@dataclass(frozen=True)
class Check:
    """One check: what each rank measures, in a process of its own."""

    name: str
    measure: Measure
    together: bool = True
    """Whether the ranks meet; otherwise each is on its own."""
    first_only: bool = False
    """Whether only rank 0 has it to do."""
    scratch: str = ""
    """The folder that it works in, where that is not its own."""
    checkpoint_seconds: float = 1e9
    loses_a_rank: bool = False


def _machine(job: Job, ctx: Context, _: Any) -> dict[str, Any]:
    return machine.describe(ctx, job.launch.resources.deterministic)


def _compute(_: Job, ctx: Context, __: Any) -> dict[str, Any]:
    from stages.selftest.compute import matmul_rate

    return matmul_rate(ctx.device)


def _collectives(job: Job, ctx: Context, ranks: Any) -> dict[str, Any]:
    from stages.selftest.collectives import measure

    offset = machine.clock_offset(ranks)
    return {**measure(ranks, ctx.device, job.node), "clock_offset_s": offset}


def _disk(job: Job, _: Context, ranks: Any) -> dict[str, Any]:
    return {
        name: disk.measure(ranks, job.node, Path(folder))
        for name, folder in job.settings.disks.items()
    }


def _alone(job: Job, ctx: Context, ranks: Any) -> dict[str, Any]:
    from stages.selftest.tiny import build_base
    from stages.selftest.training import train_tiny

    build_base(job.base)
    one = replace(
        ctx,
        world=1,
        heartbeats=None,
        sharding=Sharding.NONE,
        offload=Offload.NONE,
        sequence_parallel=1,
    )
    return train_tiny(one, ranks, job.base, job.task.world)


def _together(job: Job, ctx: Context, ranks: Any) -> dict[str, Any]:
    return _beside(job, ctx, ranks, "alone")


def _resumed(job: Job, ctx: Context, ranks: Any) -> dict[str, Any]:
    return _beside(job, ctx, ranks, "together")


def _beside(job: Job, ctx: Context, ranks: Any, other: str) -> dict[str, Any]:
    """A training of all ranks, and how far it ends from that of another check."""
    from stages.selftest.training import compare, train_tiny

    trained = train_tiny(ctx, ranks, job.base, job.task.world)
    if ctx.rank:
        return trained
    return {**trained, "apart": compare(job.folder_of(other), ctx.folder, job.base)}


def _killed(job: Job, ctx: Context, ranks: Any) -> dict[str, Any]:
    from stages.selftest.training import train_tiny

    last = ctx.rank == ctx.world - 1
    return train_tiny(ctx, ranks, job.base, job.task.world, dies=last)


def _sampler(job: Job, ctx: Context, _: Any) -> dict[str, Any]:
    from stages.selftest.sampler import sampler_gap

    return sampler_gap(ctx, job.base, Engine.TORCH)


def _vllm(job: Job, ctx: Context, _: Any) -> dict[str, Any]:
    from stages.selftest.sampler import sampler_gap

    return sampler_gap(ctx, job.base, Engine.VLLM)


CHECKS = (
    Check("machine", _machine, together=False),
    Check("compute", _compute, together=False),
    Check("collectives", _collectives),
    Check("disk", _disk),
    Check("alone", _alone, together=False, first_only=True),
    Check("together", _together),
    Check("sampler", _sampler, together=False),
    Check("killed", _killed, checkpoint_seconds=0.0, loses_a_rank=True),
    Check("resumed", _resumed, scratch="killed"),
)
VLLM = Check("vllm", _vllm, together=False, first_only=True)


def run_checks(job: Job) -> None:
    """All checks, one after another; what they find is in files."""
    checks = [*CHECKS, VLLM] if job.settings.vllm else CHECKS
    for number, check in enumerate(checks, 1):
        if check.first_only and job.task.rank:
            continue
        if not job.task.rank:
            progress = {"check": WORDS[check.name], "number": number, "of": len(checks)}
            atomic.write_json(job.folder / "progress.json", progress)
        _fork(job, check)


def _fork(job: Job, check: Check) -> None:
    """Run a check in a child, and say how that ended where the child could not."""
    started = time.monotonic()
    print(f"{check.name}: began", flush=True)
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        _be_child(job, check, started)
    status = _wait(pid, started + LIMIT_S)
    ended = time.monotonic()
    print(f"{check.name}: {ended - started:.1f} s, exit status {status}", flush=True)
    if check.loses_a_rank:
        job.write(check.name, started, values=_after_a_death(job, check, status, ended))
    elif not measured_path(job.folder, check.name, job.task.rank).exists():
        job.write(check.name, started, error=_why(job, check, status))


def _be_child(job: Job, check: Check, started: float) -> NoReturn:
    status = 1
    try:
        status = _measure(job, check, started)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _measure(job: Job, check: Check, started: float) -> int:
    from stages.engines.processes.ranks import ALONE, join

    ctx = job.context(
        check.scratch or check.name, check.name, checkpoint_seconds=check.checkpoint_seconds
    )
    assert ctx.heartbeats is not None
    ctx.heartbeats.mkdir(exist_ok=True)
    values: dict[str, Any] = {}
    try:
        if check.together:
            with among_ranks(job.task, replace(ctx, collective_seconds=MEET_S)) as others:
                others.meet()
            with join(ctx) as ranks:
                values = check.measure(job, ctx, ranks)
        else:
            values = check.measure(job, ctx, ALONE)
    except ShareDone:
        pass
    except Exception as error:
        traceback.print_exc()
        text = str(error) or repr(error)
        job.write(check.name, started, error=redact(f"{type(error).__name__}: {text}"))
        return 1
    job.write(check.name, started, values=values)
    return 0


def _wait(pid: int, deadline: float) -> int:
    """The exit status as a shell would say it; negative: the signal that ended it."""
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(POLL_S)


def _why(job: Job, check: Check, status: int) -> str:
    """Of a child that ended without a word: what it left for the others, or its end."""
    failure = atomic.read_json(_failure(job, check))
    if failure:
        return str(failure["error"])
    how = f"signal {-status} ended it" if status < 0 else f"it ended with exit status {status}"
    return f"{how} without saying why (a limit of {LIMIT_S:.0f} s, or no memory?): see the log"


def _failure(job: Job, check: Check) -> Path:
    return job.folder_of(check.name) / "heartbeats" / f"failure-{job.task.rank}.json"


def _after_a_death(job: Job, check: Check, status: int, ended: float) -> dict[str, Any]:
    """What a survivor said of the rank that died, and how long after the step it died in."""
    from stages.selftest.training import STEPS

    failure = atomic.read_json(_failure(job, check)) or {}
    begun = job.folder_of(check.name) / f"{STEPS}-{job.task.rank}"
    waited = ended - float(begun.read_text(encoding="utf-8")) if begun.exists() else None
    return {"exit_status": status, "error": failure.get("error"), "waited_s": waited}


def _import_everything(job: Job) -> None:
    """Once, before the forks."""
    deterministic = job.launch.resources.deterministic
    if deterministic:
        determinism.before_import()
    with uncollected():
        for name in ("collectives", "compute", "sampler", "tiny", "training"):
            importlib.import_module(f"stages.selftest.{name}")
        importlib.import_module("transformers.models.llama.modeling_llama")
    if deterministic:
        determinism.after_import()


def main() -> int:
    """What the batch script calls, once for each rank."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("folder", help="the self-test's folder")
    parser.add_argument("--rank", type=int, help="without Slurm: which of the processes this is")
    arguments = parser.parse_args()
    # Its own time limit ends a check; Slurm's early warning would only end the job early.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    say_anything()
    close_to_others()
    sys.stdout, sys.stderr = map(RedactedStream, (sys.stdout, sys.stderr))  # type: ignore[assignment]
    attempt = Attempt(Path(arguments.folder).resolve())
    launch = attempt.launched
    if launch.executor is ExecutorKind.SLURM:
        task = find_task(Processes.TOGETHER, 1)
    else:
        rank = arguments.rank or 0
        task = Task(rank=rank, world=launch.tasks_per_job, local_rank=rank)
    job = Job(attempt.folder, launch, read_settings(attempt.folder), task, node_name())
    leads = not task.rank
    with hold_lock(attempt.folder / "alive", wait=True) if leads else nullcontext():
        if leads:
            attempt.write(Worker(pid=os.getpid(), host=socket.gethostname(), time=time.time()))
        _import_everything(job)
        run_checks(job)
        done_path(job.folder, task.rank).touch()
        if leads:
            attempt.write(Result(state=State.COMPLETED, ended=time.time()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
