"""`lockstep run`: the stale stages, in parallel where the graph allows it, each through DVC.

Each stage is `dvc repro --single-item`, so DVC alone decides what is computed, restored or left,
and records it. What DVC will restore, by the plan, goes first, all in one process: a process for
each would take minutes. A stage starts when all before it are done. The first failure stops further
starts; what runs is waited for. Ctrl-C and SIGTERM cancel what runs.
"""

import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from pipelines.base.console import Console, describe_metrics, seconds
from pipelines.base.errors import LockstepError
from pipelines.base.interrupts import Interrupts
from pipelines.base.processes import end_processes, sleep_beside
from pipelines.base.repository import Repository
from pipelines.config.chosen_profile import profile_name
from pipelines.config.memory import refuse_what_cannot_fit
from pipelines.config.params import load_params
from pipelines.config.profiles import ExecutorKind, Profile, load_profile
from pipelines.driver.activity import activity
from pipelines.driver.driver import SECOND_INTERRUPT_S
from pipelines.driver.dvc_process import (
    dvc_command,
    dvc_environment,
    interrupt,
    prepare_dvc,
    start_dvc,
)
from pipelines.driver.stage import describe_command, render_stage
from pipelines.driver.upkeep import after_a_run, before_a_run
from pipelines.dvc_repo.lock_order import order_lock
from pipelines.dvc_repo.plan import PlannedStage, make_plan
from pipelines.dvc_repo.repair import repair_dvc_files
from pipelines.identity.code import CODE_STAGE
from pipelines.ledger.entry import Entry, Ledger
from pipelines.ledger.invocation import new_invocation
from pipelines.ledger.state import State
from pipelines.ledger.stop_requests import StopRequest, request_stop
from pipelines.runs.chain import submit_chain
from pipelines.runs.current_code import plan_stages
from pipelines.runs.detach import submit_ready
from pipelines.runs.exclusive import only_pipeline
from pipelines.runs.record import record_finished
from pipelines.runs.schedule import Schedule
from pipelines.tracking.cursor import note_restored
from pipelines.tracking.health import Health
from pipelines.tracking.rounds import ship_all
from pipelines.tracking.shipper import problem, start_shipper
from pipelines.warm.client import Forked
from pipelines.warm.jobs import prepare_jobs
from stages.contracts.params import Params
from stages.contracts.prepare import PREPARE
from stages.health import Symptom

POLL_S = 0.1
OUTPUT_TAIL = 30
SHIP_TIMEOUT_S = 30.0


def run_pipeline(
    targets: list[str],
    chosen_profile: str | None,
    *,
    dry_run: bool = False,
    detach: bool = False,
    chain: bool = False,
) -> None:
    """Bring the targets and all before them up to date, or say that they are.

    With `detach` or `chain`, jobs are submitted and not waited for: those that can start at once,
    or all.
    """
    repository = Repository.find()
    console = Console()
    params = load_params(repository.root)
    name = profile_name(chosen_profile)
    profile = load_profile(repository.root, name)
    if dry_run:
        for stage in make_plan(repository.root, targets, params):
            if stage.stale and stage.address != CODE_STAGE:
                console.line(render_stage(stage.address, name))
        return
    with only_pipeline(repository, "lockstep run", console.line) as lock:
        run = PipelineRun(repository, name, profile, console, lock)
        before_a_run(repository, params, console.line)
        if not (detach or chain or (repository.root / "dvc.lock").exists()):
            # Nothing is recorded, so there is something to run: servers start while it is planned.
            run.prepare(PREPARE.name)
        plan = plan_stages(repository, targets, params)
        stale = sum(stage.stale for stage in plan)
        cached = sum(stage.cached for stage in plan)
        if not stale:
            order_lock(repository.root)  # an earlier command may have been killed just before
            start_shipper(repository)
            console.line(f"nothing to do: all {len(plan)} stages are up to date")
            return
        to_run = [stage.address for stage in plan if stage.stale and not stage.cached]
        refuse_what_cannot_fit(repository.root, params, name, profile, to_run)
        if detach or chain:
            plan = record_finished(repository, targets, name, console)
            if chain:
                submit_chain(repository, profile, name, plan, console)
            else:
                submit_ready(repository, name, plan, console)
            start_shipper(repository)
            return
        restore = f", {cached} to restore" if cached else ""
        console.line(
            f"{stale - cached} of {len(plan)} stages to run{restore}, profile {name}: "
            f"{profile.description}"
        )
        started = time.monotonic()
        run.prepare(*to_run[:1])
        try:
            if cached:
                plan = run.restore(plan, params, targets)
            run.run(plan)
        finally:
            ship_all(repository, timeout=SHIP_TIMEOUT_S, ended=run.invocation.id)
            trouble = problem(repository)
            if trouble:
                console.line(trouble)
        found = [symptom for stage in plan for symptom in run.warnings(stage.address)]
        count = "1 warning" if len(found) == 1 else f"{len(found)} warnings"
        see = f"; {count}, see `lockstep status`" if found else ""
        taken = seconds(time.monotonic() - started)
        console.line(f"all {len(plan)} stages are up to date, after {taken}{see}")


@dataclass
class _Running:
    process: Forked | subprocess.Popen[bytes]
    output: Path | None
    before: set[float]
    """When what the ledger has of the stage was published, as it was at the start."""
    began: float = field(default_factory=time.monotonic)

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None


class PipelineRun:
    """One invocation of `lockstep run`."""

    def __init__(
        self,
        repository: Repository,
        profile_name: str,
        profile: Profile,
        console: Console,
        lock: int,
    ) -> None:
        self.repository = repository
        self.profile = profile
        self.console = console
        self.lock = lock
        self.invocation = new_invocation("lockstep run")
        self.environment = dvc_environment(profile_name, self.invocation)
        self.ledger = Ledger(repository.jobs)
        self.health = Health(repository.root)
        self.running: dict[str, _Running] = {}
        self.interrupts = Interrupts()
        self.stop_request: StopRequest | None = None
        self.warned: float | None = None
        """When the first Ctrl-C was answered."""
        self.finished = 0
        self.prepared: set[str] = set()

    def prepare(self, *addresses: str) -> None:
        """Have the processes started that are forked for these stages, before the first one asks.

        Those that are on their way already are not started again.
        """
        if self.profile.executor is ExecutorKind.DEBUG:
            return
        if not self.prepared:
            prepare_dvc(self.repository, self.environment)
        names = {address.split("@")[0] for address in addresses} - self.prepared
        for name in names if self.profile.executor is ExecutorKind.LOCAL else ():
            prepare_jobs(self.repository, self.profile.resources(name), self.environment)
        self.prepared |= names

    def restore(
        self, plan: list[PlannedStage], params: Params, targets: list[str]
    ) -> list[PlannedStage]:
        """Have DVC bring back what its cache has; the plan of what is left.

        Should an object of the cache turn out to be gone, its stage is computed like any other.
        """
        names = [stage.address for stage in plan if stage.cached]
        began = time.monotonic()
        output = self.repository.home / "runs" / self.invocation.id / "restored.log"
        before = self.interrupts.catch()
        try:
            process = start_dvc(
                names, self.repository, self.environment, output, self.lock, only_restore=True
            )
            is_interrupted = False
            while process.poll() is None:
                if self.interrupts.received and not is_interrupted:
                    is_interrupted = True
                    interrupt(process)
                self.console.progress(f"restoring {len(names)} stages from DVC's cache")
                time.sleep(POLL_S)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self.console.clear()
        repair_dvc_files(self.repository, self.console.line)
        left = plan_stages(self.repository, targets)
        stale = {stage.address for stage in left if stage.stale}
        done = [name for name in names if name not in stale]
        taken = seconds(time.monotonic() - began)
        if done:
            origin = describe_command(self.repository, params, self.invocation)
            note_restored(self.repository, origin, done)
            self.console.line(f"restored from DVC's cache ({taken}): {', '.join(done)}")
            for name in done:
                for symptom in self.warnings(name):
                    self.console.line(f"    warning: {name}: {symptom}")
        if self.interrupts.received:
            raise LockstepError(
                f"{self.interrupts.received[0].name} received; run the same command to continue"
            )
        return left

    def run(self, plan: list[PlannedStage]) -> None:
        """Bring every stale stage of the plan up to date, or raise with what failed."""
        schedule = Schedule(plan, self.profile.parallel)
        failed: list[str] = []
        before = self.interrupts.catch()
        try:
            while not schedule.is_over:
                if not failed and not self.interrupts.received:
                    for address in schedule.start():
                        self._start(address)
                if not self.running:
                    break
                self._handle_interrupts()
                for address in [name for name, job in self.running.items() if job.has_ended]:
                    if self._succeeded(address, len(schedule)):
                        schedule.end(address)
                    else:
                        failed.append(address)
                self._show_progress()
                sleep_beside([job.process.pid for job in self.running.values()], POLL_S)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        after_a_run(self.repository, self.console.line)
        if self.stop_request is StopRequest.DETACH:
            raise LockstepError(
                "detached: the jobs go on; the same command waits for them again, "
                "`lockstep status` shows them, `lockstep cancel` ends them"
            )
        if self.interrupts.received:
            raise LockstepError(
                f"{self.interrupts.received[0].name} received: the running stages were cancelled; "
                "progress is saved: run the same command to continue"
            )
        if failed:
            raise LockstepError(
                f"failed: {', '.join(failed)}; fix the cause, then run the same command"
            )

    def warnings(self, address: str) -> tuple[Symptom, ...]:
        """What there is to warn of at a stage that has ended."""
        return self.health.of(address, self.ledger.latest(address).get(address), now=True)

    def _start(self, address: str) -> None:
        records = [entry.record for entry in self.ledger.entries(address)]
        before = {record.published for record in records if record}
        if self.profile.executor is ExecutorKind.DEBUG:
            # One process, this terminal: a breakpoint in a stage must reach the user.
            here = subprocess.Popen(
                dvc_command(address), cwd=self.repository.root, env=self.environment
            )
            self.running[address] = _Running(here, None, before)
            return
        output = self.repository.home / "runs" / self.invocation.id / f"{address}.log"
        process = start_dvc([address], self.repository, self.environment, output, self.lock)
        self.running[address] = _Running(process, output, before)

    def _succeeded(self, address: str, total: int) -> bool:
        job = self.running.pop(address)
        taken = seconds(time.monotonic() - job.began)
        entry = self.ledger.latest(address).get(address)
        if job.process.returncode == 0:
            self.finished += 1
            count = f"[{self.finished:>{len(str(total))}}/{total}]"
            self.console.line(f"{count} {address}: {self._outcome(entry, job)} ({taken})")
            for symptom in self.warnings(address):
                self.console.line(f"    warning: {symptom}")
            return True
        state = entry.state() if entry else None
        if self.stop_request is StopRequest.DETACH and state is not None and state.alive:
            self.console.line(f"{address}: left running")
            return False
        if self.interrupts.received:
            self.console.line(f"{address}: cancelled")
            return False
        if state is State.CANCELLED and entry and entry.attempts()[-1].was_cancelled:
            self.console.line(f"{address}: cancelled by another command, such as `lockstep cancel`")
            return False
        self.console.line(f"{address}: FAILED after {taken}")
        if job.output:
            lines = job.output.read_text(errors="replace", encoding="utf-8").splitlines()
            for line in lines[-OUTPUT_TAIL:]:
                self.console.line(f"    {line}")
        return False

    def _outcome(self, entry: Entry | None, job: _Running) -> str:
        record = entry.record if entry else None
        if entry is None or record is None or record.published in job.before:
            return "unchanged or restored from the cache"
        return describe_metrics(record.metrics or {})

    def _show_progress(self) -> None:
        if not self.console.shows_progress:
            return
        running = self.running.items()
        self.console.progress(
            " | ".join(f"{name} {self._activity(name, job)}" for name, job in running)
        )

    def _activity(self, address: str, job: _Running) -> str:
        entry = self.ledger.latest(address).get(address)
        record = entry.record if entry else None
        if entry is None or (record and record.published in job.before):
            return "starting"
        return activity(entry, entry.state(), self.health.of(address, entry))

    def _handle_interrupts(self) -> None:
        """The first Ctrl-C cancels the jobs; a second one soon after leaves those on Slurm be."""
        received = self.interrupts.received
        if not received or self.stop_request:
            return
        on_slurm = self.profile.executor is ExecutorKind.SLURM
        first = received[0].name
        waited = time.monotonic() - self.warned if self.warned is not None else 0.0
        if on_slurm and (first == "SIGHUP" or len(received) > 1):
            self._request_stop(StopRequest.DETACH)
        elif not on_slurm or first != "SIGINT" or waited >= SECOND_INTERRUPT_S:
            self._request_stop(StopRequest.CANCEL)
        elif self.warned is None:
            names = ", ".join(f"{name} (job {self._job(name)})" for name in self.running)
            self.console.line(
                f"{first} received; cancelling {names} in {SECOND_INTERRUPT_S:.0f} s: "
                "press Ctrl-C again to leave them running"
            )
            self.warned = time.monotonic()

    def _request_stop(self, request: StopRequest) -> None:
        """Of the drivers, and of what is no stage of ours but a command in a user's dvc.yaml."""
        self.stop_request = request
        request_stop(self.repository, self.invocation.id, request)
        for job in self.running.values():
            if request is StopRequest.DETACH or job.has_ended:
                continue
            with suppress(psutil.NoSuchProcess):
                if job.output:
                    interrupt(job.process)
                else:
                    below = psutil.Process(job.process.pid).children()
                    end_processes([child.pid for child in below])

    def _job(self, address: str) -> str:
        entry = self.ledger.latest(address).get(address)
        attempts = entry.attempts() if entry else []
        return ",".join(attempts[-1].jobs) if attempts and attempts[-1].jobs else "not submitted"
