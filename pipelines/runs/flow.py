"""The Prefect flow: the stale stages of DVC's graph, in parallel where it allows, each through DVC.

One task for each stale stage, named by its address. DVC decides what is computed, restored or left,
and is the only cache. A stage waits for those before it; where one of them failed it does not run,
while other branches finish. Only failures that another try can fix are tried again. Whatever ends
the flow run, a cancellation above all, cancels the jobs of its stages first.
"""

import signal
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from prefect import Task, allow_failure, flow, get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State as PrefectState
from prefect.client.schemas.objects import TaskRun
from prefect.futures import PrefectFuture, as_completed
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled, Completed, Failed

from pipelines.base.errors import LockstepError
from pipelines.base.processes import end_processes
from pipelines.base.redact import redact
from pipelines.base.repository import Repository
from pipelines.config.chosen_profile import profile_name
from pipelines.config.memory import refuse_what_cannot_fit
from pipelines.config.params import load_params
from pipelines.config.profiles import load_profile
from pipelines.driver.dvc_process import dvc_environment, interrupt, start_dvc
from pipelines.driver.stage import describe_command
from pipelines.driver.upkeep import after_a_run, before_a_run
from pipelines.dvc_repo.lock_order import order_lock
from pipelines.ledger.entry import Attempt, Ledger
from pipelines.ledger.invocation import new_invocation
from pipelines.ledger.retries import is_retryable
from pipelines.ledger.stop_requests import StopRequest, request_stop
from pipelines.runs.current_code import plan_stages
from pipelines.runs.exclusive import only_pipeline
from pipelines.runs.schedule import Schedule
from pipelines.servers.running import running as running_servers
from pipelines.tracking.cursor import end_invocation, note_restored, runs_page
from pipelines.tracking.shipper import start_shipper
from pipelines.warm.client import Forked

POLL_S = 0.1
RETRY_DELAYS_S = [2, 5]
CANCEL_GRACE_S = 20.0
"""For dvc and its stage to end a job. Prefect kills the flow run's process after 30 seconds."""
OUTPUT_TAIL = 30
REPORT = "artifacts/report"


@flow(name="lockstep", persist_result=False)
def pipeline(profile: str | None = None, targets: list[str] | None = None) -> PrefectState:
    """Bring the targets (all stages without any) and what they need up to date.

    Args:
        profile: slurm_profiles/NAME.yaml; without it the worker's LOCKSTEP_PROFILE, else local.
        targets: addresses as DVC spells them, such as report or policy_update@iter_002.
    """
    logger = get_run_logger()
    repository = Repository.find()
    chosen = profile_name(profile)
    loaded = load_profile(repository.root, chosen)
    params = load_params(repository.root)
    name = " ".join(filter(None, ["prefect", deployment.name, flow_run.name]))
    invocation = new_invocation(name)
    with only_pipeline(repository, name, logger.info) as lock:
        before_a_run(repository, params, logger.info)
        plan = plan_stages(repository, targets, params)
        stale = [stage for stage in plan if stage.stale]
        if not stale:
            order_lock(repository.root)  # an earlier flow may have been killed just before
            return Completed(message=f"all {len(plan)} stages are up to date")
        to_run = [stage.address for stage in stale if not stage.cached]
        refuse_what_cannot_fit(repository.root, params, chosen, loaded, to_run)
        for stage in stale:
            logger.info("%s: %s", stage.address, ", ".join(stage.reasons))
        stages = StageProcesses(
            repository=repository,
            invocation=invocation.id,
            environment=_without_flow_variables(dvc_environment(chosen, invocation)),
            output=repository.home / "runs" / invocation.id,
            lock=lock,
        )
        try:
            ended = _run_graph(Schedule(stale, loaded.parallel), stages)
            restored = [
                it.address for it in stale if it.cached and ended[it.address].is_completed()
            ]
            if restored:
                origin = describe_command(repository, params, invocation)
                note_restored(repository, origin, restored)
        finally:
            stages.stop()
            after_a_run(repository, logger.info)
            end_invocation(repository, invocation.id)
            start_shipper(repository)
    _show_report(repository)
    return _summary(ended, up_to_date=len(plan) - len(stale))


def _show_report(repository: Repository) -> None:
    """The report's summary as an artifact of the flow run, with the way to its page."""
    summary = repository.root / REPORT / "summary.md"
    try:
        text = summary.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    mlflow = running_servers(repository).get("mlflow")
    runs = f", or among the [runs]({mlflow.url}{runs_page(repository)})" if mlflow else ""
    create_markdown_artifact(
        key="report",
        markdown=f"{text}\nWith pictures: `{summary.with_name('index.html')}`{runs}.\n",
        description="What training did, as the workspace has it now.",
    )


def _run_graph(schedule: Schedule, stages: "StageProcesses") -> dict[str, PrefectState]:
    """Submit each stage when those before it have ended; how each ended, by address."""
    futures: dict[str, PrefectFuture[Any]] = {}
    running: dict[PrefectFuture[Any], str] = {}
    ended: dict[str, PrefectState] = {}
    failures: dict[str, set[str]] = {}
    """The stages above each one because of which it does not run."""
    while not schedule.is_over:
        for address in schedule.start():
            upstream = schedule.upstream[address]
            lost = {name for name in upstream if not ended[name].is_completed()}
            failures[address] = set().union(*(failures[name] or {name} for name in lost))
            # Prefect draws the graph from wait_for.
            before = (upstream - lost) | failures[address]
            links = [allow_failure(futures[name]) for name in sorted(before)]
            futures[address] = _task(address, stages, failures[address]).submit(
                return_state=False, wait_for=links
            )
            running[futures[address]] = address
        future = next(as_completed(list(running)))
        future.wait()
        address = running.pop(future)
        ended[address] = future.state
        schedule.end(address)
    return ended


def _summary(ended: dict[str, PrefectState], up_to_date: int) -> PrefectState:
    done = [address for address, state in ended.items() if state.is_completed()]
    failed = [address for address, state in ended.items() if state.is_failed()]
    if len(done) == len(ended):
        return Completed(message=f"{len(done)} stages done, {up_to_date} were up to date")
    left = [address for address in ended if address not in (*done, *failed)]
    waiting = f"; not run after that: {', '.join(left)}" if left else ""
    return Failed(message=f"failed: {', '.join(failed)}{waiting}; {len(done)} stages done")


class FailedStageError(LockstepError):
    """dvc could not bring a stage up to date; the message holds its last lines."""

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


def _worth_retrying(_task: Task[Any, Any], _run: TaskRun, state: PrefectState) -> bool:
    return isinstance(state.data, FailedStageError) and state.data.retryable


def _task(
    address: str, stages: "StageProcesses", failures: set[str]
) -> Task[[], PrefectState | None]:
    @task(
        name=address,
        task_run_name=address,
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=len(RETRY_DELAYS_S),
        retry_delay_seconds=list(RETRY_DELAYS_S),
        retry_condition_fn=_worth_retrying,
    )
    def run_stage() -> PrefectState | None:
        if failures:
            # What Prefect itself does not run stays Pending for ever.
            return Cancelled(message=f"not run, after the end of {', '.join(sorted(failures))}")
        return stages.run(address)

    return run_stage


@dataclass
class StageProcesses:
    """The dvc processes of one flow run.

    Each has a session of its own and writes to a file, so that a flow process which is killed takes
    none of them with it half-way through publishing.
    """

    repository: Repository
    invocation: str
    environment: dict[str, str]
    output: Path
    lock: int
    running: dict[str, Forked | subprocess.Popen[bytes]] = field(default_factory=dict)
    stopping: bool = False
    guard: threading.Lock = field(default_factory=threading.Lock)

    def run(self, address: str) -> PrefectState | None:
        """Run one stage to its end, its output going to the task run's log."""
        before = _latest_attempt(self.repository, address)
        was_alive = before is not None and before.state().alive
        lines = _Lines(self.output / f"{address}.log")
        process = self._start(address, lines.path)
        if process is None:
            return Cancelled(message=f"{address}: not started, the flow run is ending")
        while process.poll() is None:
            lines.pass_on()
            time.sleep(POLL_S)
        lines.pass_on()
        with self.guard:
            del self.running[address]
        if process.returncode == 0:
            return None
        if self.stopping:
            return Cancelled(message=f"{address}: cancelled with the flow run")
        attempt = _latest_attempt(self.repository, address)
        looked_at = attempt is not None and (attempt != before or was_alive)
        get_run_logger().error("%s failed: %s", address, lines.last())
        raise FailedStageError(
            f"{address}: dvc ended with status {process.returncode}:\n{lines.tail()}",
            # Killed, dvc was short of memory or its machine went down.
            retryable=process.returncode == -signal.SIGKILL
            or (looked_at and attempt is not None and is_retryable(attempt)),
        )

    def stop(self) -> None:
        """Start nothing more and end what runs; returns when the jobs are gone."""
        with self.guard:
            self.stopping = True
            left = list(self.running.values())
        request_stop(self.repository, self.invocation, StopRequest.CANCEL)
        for process in left:
            if process.poll() is None:
                # For what is no stage of ours; dvc ignores it while a command runs.
                interrupt(process)
        deadline = time.monotonic() + CANCEL_GRACE_S
        while any(process.poll() is None for process in left) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for process in left:
            if process.poll() is None:
                # What is below dvc first: without its command dvc ends by itself, if it can.
                with suppress(psutil.NoSuchProcess):
                    below = psutil.Process(process.pid).children()
                    end_processes([child.pid for child in below], grace=2.0)
                process.kill()
                process.wait()

    def _start(self, address: str, output: Path) -> Forked | subprocess.Popen[bytes] | None:
        with self.guard:
            if self.stopping:
                return None
            process = start_dvc([address], self.repository, self.environment, output, self.lock)
            self.running[address] = process
            return process


class _Lines:
    """What dvc appends to its output file, handed to the run's logger line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = path.stat().st_size if path.exists() else 0
        self._start = self._read
        self._logger = get_run_logger()

    def pass_on(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read += len(whole + newline)
        for line in whole.decode(errors="replace").splitlines():
            if line.strip():
                self._logger.info("%s", redact(line))

    def last(self) -> str:
        """What dvc's driver said of the failure: the line before DVC's own."""
        lines = [line for line in self.tail().splitlines() if not line.startswith("ERROR: ")]
        return lines[-1] if lines else f"see {self.path}"

    def tail(self) -> str:
        with self.path.open("rb") as file:
            file.seek(self._start)
            lines = file.read().decode(errors="replace").splitlines()
        return redact("\n".join(line for line in lines[-OUTPUT_TAIL:] if line.strip()))


def _latest_attempt(repository: Repository, address: str) -> Attempt | None:
    entry = Ledger(repository.jobs).latest(address).get(address)
    attempts = entry.attempts() if entry else []
    return attempts[-1] if attempts else None


def _without_flow_variables(environment: dict[str, str]) -> dict[str, str]:
    """Drop what Prefect tells the flow run's process: its control token, the server's password."""
    of_the_flow = ("PREFECT__", "PREFECT_API_", "PREFECT_SERVER_API_")
    return {name: value for name, value in environment.items() if not name.startswith(of_the_flow)}
