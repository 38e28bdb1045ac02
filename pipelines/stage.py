"""The driver of one stage: what dvc.yaml's commands run.

It fixes the stage's identity, finds or submits the job, waits, and publishes. It may be killed at
any moment; run again, it finds the job by its fingerprint and goes on from there.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

from pipelines import atomic
from pipelines.console import Console, describe_progress, seconds
from pipelines.errors import LockstepError
from pipelines.executors import Executor, make_executor, render_sbatch
from pipelines.hashing import HashCache
from pipelines.invocation import current_invocation, dvc_ancestor, runner_lives
from pipelines.ledger import Attempt, Entry, Ledger, State
from pipelines.logs import LAUNCHER_PREFIX
from pipelines.params import load_params
from pipelines.processes import process_lives
from pipelines.profiles import ExecutorKind, Resources, load_profile, profile_name
from pipelines.publish import drop_recorded, publish, recorded_outs
from pipelines.repository import Repository
from pipelines.shipper import start_shipper
from pipelines.spec import make_spec
from stages.contracts.catalog import BoundStage, bind, bind_all
from stages.contracts.params import Params

POLL_S = 0.05
LOG_TAIL = 20


class Cancelled(Exception):
    """Somebody asked for the end of the job; the message says who."""


def run_stage(address: str, profile: str | None = None) -> None:
    """Compute one stage, or find it computed, and publish its outputs into the workspace."""
    repository = Repository.find()
    params = load_params(repository.root)
    bound = _bind(address, params)
    chosen = profile_name(profile)
    loaded = load_profile(repository.root, chosen)
    executor = make_executor(loaded.executor)
    ledger = Ledger(repository.jobs)
    drop_recorded(repository.root, ledger)
    hashes = HashCache(repository.home / "hashes.json")
    spec = make_spec(repository.root, bound, hashes)
    hashes.save()
    entry = ledger.find_or_create(spec, _info(repository))
    launch = {
        "executor": loaded.executor,
        "profile": chosen,
        "root": str(repository.root),
        "resources": loaded.resources(bound.stage.name).model_dump(mode="json"),
        "graph": _graph_before(bound, repository.root, params) if bound.stage.wants_graph else [],
    }
    start_shipper(repository)
    console = Console()
    with entry.lease():
        _drive(console, executor, entry, launch)
        record = publish(repository.root, entry)
    start_shipper(repository)
    _say_end(console, repository.root, entry, record)


def _drive(console: Console, executor: Executor, entry: Entry, launch: dict[str, Any]) -> None:
    """Bring the entry to its end: find its job, or submit one, and wait."""
    state = entry.state()
    if state in (State.COMPLETED, State.PUBLISHED):
        console.line(f"{entry.stage}: found finished; publishing")
        return
    interrupts = Interrupts.caught(unless=launch["executor"] is ExecutorKind.DEBUG)
    if state.alive:
        attempt = entry.attempts()[-1]
        console.line(f"{entry.stage}: its job still runs; waiting for it (log: {attempt.folder})")
    else:
        attempt = entry.new_attempt()
        again = f", attempt {attempt.number}" if attempt.number > 1 else ""
        console.line(
            f"{entry.stage}: submitting to {launch['profile']}{again} (log: {attempt.folder})"
        )
        _submit(executor, attempt, launch)
    try:
        _wait(console, entry, attempt, interrupts)
    except Cancelled as reason:
        job = (attempt.launch or {}).get("job", "?")
        console.line(f"{entry.stage}: {reason}; cancelling job {job}")
        attempt.mark_cancelled()
        executor.cancel(attempt)
    _raise_unless_completed(entry)


def _submit(executor: Executor, attempt: Attempt, launch: dict[str, Any]) -> None:
    """The worker reads launch.json, so it comes before the job; the job's id comes after."""
    launch = {**launch, "time": time.time()}
    atomic.write_json(attempt.folder / "launch.json", launch)
    submitted = executor.submit(attempt, Resources.model_validate(launch["resources"]))
    atomic.write_json(attempt.folder / "launch.json", {**launch, **submitted})


def render_stage(address: str, profile: str | None = None) -> str:
    """The sbatch script of a stage, how to submit it by hand, and how to follow it."""
    repository = Repository.find()
    bound = _bind(address, load_params(repository.root))
    resources = load_profile(repository.root, profile_name(profile)).resources(bound.stage.name)
    folder = repository.jobs / bound.address / "dry-run"
    script = render_sbatch(bound.address, folder, resources)
    return (
        f"{script}\n"
        f"# submit by hand:  lockstep stage {bound.address} --dry-run > job.sh && sbatch job.sh\n"
        f"# follow:          tail -F {folder}/*_log.out {folder}/*_log.err\n"
    )


def _bind(address: str, params: Params) -> BoundStage:
    try:
        return bind(address, params)
    except ValueError as error:
        raise LockstepError(str(error)) from None


def _info(repository: Repository) -> dict[str, Any]:
    return {
        "invocation": current_invocation().as_json(),
        "git_commit": repository.git_commit(),
        "experiment": os.environ.get("DVC_EXP_NAME"),
    }


def _graph_before(bound: BoundStage, root: Path, params: Params) -> list[dict[str, Any]]:
    """Every node with the stages before it and the hashes dvc.lock gives its outputs.

    The stage's own hash there, if any, is of an earlier run and would make its output depend on it.
    """
    recorded = {**recorded_outs(root), bound.address: {}}
    nodes = bind_all(params)
    maker = {path: node.address for node in nodes for path in (*node.outs.values(), node.metrics)}
    graph = []
    for node in nodes:
        deps = {
            maker[path]
            for needed in node.inputs.values()
            for path in maker
            if path == needed or path.startswith(f"{needed}/")
        }
        outs = {path: recorded.get(node.address, {}).get(path) for path in node.outs.values()}
        graph.append({"stage": node.address, "deps": sorted(deps), "outs": outs})
    return graph


def _wait(console: Console, entry: Entry, attempt: Attempt, interrupts: "Interrupts") -> None:
    """Until the job has ended, or somebody asked for its end, or nobody is left to wait for it."""
    parent = dvc_ancestor()
    said_run = False
    while (state := entry.state()).alive:
        if interrupts.received:
            raise Cancelled(f"{interrupts.received} received")
        if not runner_lives():
            # Only kill -9 ends a runner without its telling us: leave the job to the next command.
            raise LockstepError(f"{entry.stage}: the pipeline's process is gone; the job goes on")
        if parent is not None and not process_lives(parent.pid, parent.create_time()):
            raise Cancelled("the dvc process that started this stage is gone")
        tracking = None if said_run else atomic.read_json(entry.folder / "tracking.json")
        if tracking and tracking.get("url"):
            console.line(f"{entry.stage}: MLflow run {tracking['url']}")
            said_run = True
        if console.is_terminal:
            progress = atomic.read_json(entry.folder / "progress.json")
            started = (attempt.worker or {}).get("time", time.time())
            what = describe_progress(progress, started) if state is State.RUNNING else state
            console.progress(f"{entry.stage}: {what}")
        time.sleep(POLL_S)
    console.clear()


class Interrupts:
    """Remembers the signal that asked the driver to end, to be looked at between two polls."""

    def __init__(self) -> None:
        self.received: str | None = None

    @classmethod
    def caught(cls, *, unless: bool) -> "Interrupts":
        """From here on, unless the job is this process and Ctrl-C should reach the debugger."""
        interrupts = cls()
        for number in () if unless else (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, interrupts._receive)
        return interrupts

    def _receive(self, number: int, _: Any) -> None:
        self.received = signal.Signals(number).name


def _raise_unless_completed(entry: Entry) -> None:
    state = entry.state()
    if state is State.COMPLETED:
        return
    if state is State.CANCELLED:
        raise LockstepError(f"{entry.stage}: cancelled; run the same command to go on from there")
    attempt = entry.attempts()[-1]
    reason = (attempt.result or {}).get(
        "error", "its process is gone without a word: killed, or out of memory?"
    )
    raise LockstepError(
        f"{entry.stage}: {state}: {reason}\n{tail(attempt)}"
        f"full log: lockstep logs {entry.stage}\n"
        "what is done is kept: mend the cause and run the same command again"
    )


def tail(attempt: Attempt, lines: int = LOG_TAIL) -> str:
    """The last lines of what the job wrote to its error log."""
    written = [
        line
        for path in sorted(attempt.folder.glob("*_log.err"))
        for line in path.read_text(errors="replace").splitlines()
        if not line.startswith(LAUNCHER_PREFIX)
    ]
    return "".join(f"  | {line}\n" for line in written[-lines:])


def _say_end(console: Console, root: Path, entry: Entry, record: dict[str, Any]) -> None:
    metrics = atomic.read_json(root / entry.spec.metrics) or {}
    shown = ", ".join(f"{name} {value:.4g}" for name, value in list(metrics.items())[:6])
    console.line(f"{entry.stage}: done in {seconds(record['ended'] - record['started'])}: {shown}")
    for path, digest in record["outs"].items():
        console.line(f"{entry.stage}:   {path}  {digest}")
