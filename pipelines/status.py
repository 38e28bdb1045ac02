"""How every stage fares, read off the ledger, so that it works while DVC holds its locks."""

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipelines import atomic
from pipelines.console import describe_progress, describe_warnings, seconds
from pipelines.health import Health
from pipelines.ledger import Attempt, Entry, Ledger, State
from pipelines.link import unstarted_links
from pipelines.params import load_params
from pipelines.publish import recorded_outs
from pipelines.repository import Repository
from pipelines.scheduler import Scheduler
from pipelines.slurm_queue import why_they_wait
from pipelines.verdict import verdict_in_session, verdict_on
from stages.contracts.catalog import bind_all
from stages.health import Symptom

RECORDED = "recorded"
"""dvc.lock has the stage's outputs, made by a job that this clone knows nothing of."""
ABSENT = "-"


@dataclass(frozen=True)
class StageStatus:
    """One line of `lockstep status`."""

    stage: str
    state: str
    iteration: str | None = None
    reason: str = ""
    """Why Slurm has not started it."""
    elapsed: float | None = None
    limit: float | None = None
    progress: str = ""
    error: str | None = None
    attempts: int = 0
    restarts: int = 0
    """How often it was started again, by Slurm or in a new job."""
    job: str | None = None
    host: str | None = None
    nodes: str | None = None
    gpus: int = 0
    mlflow_run: str | None = None
    mlflow_url: str | None = None
    log: str | None = None
    warnings: tuple[Symptom, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def stage_statuses(repository: Repository) -> list[StageStatus]:
    """Every stage of the graph under the current params, in order."""
    Scheduler(repository).look()
    latest = Ledger(repository.jobs).latest()
    links = unstarted_links(repository)
    recorded = recorded_outs(repository.root)
    health = Health(repository.root)
    statuses = []
    for bound in bind_all(load_params(repository.root)):
        name, entry = bound.address, latest.get(bound.address)
        iteration = name.partition("@")[2] or None
        if name in links and _is_newer(links[name].attempt, entry):
            status = _of_attempt(name, links[name].attempt, links[name].attempt.state())
        elif entry is not None:
            status = _of_entry(entry)
        else:
            status = StageStatus(name, RECORDED if name in recorded else ABSENT)
        warnings = health.of(name, entry)
        statuses.append(replace(status, iteration=iteration, warnings=warnings))
    return statuses


def _is_newer(link: Attempt, entry: Entry | None) -> bool:
    submitted: float = (link.launch or {}).get("time", 0.0)
    return entry is None or submitted > entry.asked_for


def _of_entry(entry: Entry) -> StageStatus:
    attempts, state = entry.attempts(), entry.state()
    if not attempts:
        return StageStatus(entry.stage, state.value)
    started = (attempts[-1].worker or {}).get("time", 0)
    progress = atomic.read_json(entry.folder / "progress.json") if state is State.RUNNING else None
    tracking = atomic.read_json(entry.folder / "tracking.json") or {}
    before = (attempts[-1].launch or {}).get("restarts_before", 0)
    return replace(
        _of_attempt(entry.stage, attempts[-1], state),
        progress=describe_progress(progress, started) if progress else "",
        attempts=len(attempts),
        restarts=before + attempts[-1].restarts,
        mlflow_run=tracking.get("run_id"),
        mlflow_url=tracking.get("url"),
    )


def _of_attempt(stage: str, attempt: Attempt, state: State) -> StageStatus:
    launch, worker, result = attempt.launch or {}, attempt.worker or {}, attempt.result or {}
    jobs = list((attempt.scheduler or {}).get("jobs", {}).values())
    resources = launch.get("resources", {})
    started = result.get("started") or worker.get("time")
    ended = result.get("ended") or (time.time() if state is State.RUNNING else None)
    hosts = sorted({job["nodes"] for job in jobs if job["nodes"]})
    limit = 60.0 * resources["time_minutes"] if attempt.on_slurm else None
    return StageStatus(
        stage=stage,
        state=state.value,
        reason=why_they_wait(jobs) if state is State.QUEUED else "",
        elapsed=max(ended - started, 0.0) if started and ended else None,
        limit=limit,
        error=_error(attempt, state),
        attempts=1,
        job=launch.get("job") or ",".join(attempt.jobs) or None,
        host=worker.get("host"),
        nodes=", ".join(hosts) or None,
        gpus=resources.get("nodes", 1) * resources.get("gpus_per_node", 0),
        log=str(attempt.folder),
    )


def _error(attempt: Attempt, state: State) -> str | None:
    if state not in (State.FAILED, State.CANCELLED, State.DIED):
        return None
    if attempt.on_slurm and attempt.result is None and not attempt.was_cancelled:
        return verdict_on(attempt).what
    if attempt.session and attempt.result is None and not attempt.was_cancelled:
        return verdict_in_session(attempt).what
    error: str | None = (attempt.result or {}).get("error")
    return error


def render(statuses: list[StageStatus]) -> str:
    """A table for people; below it, where to look at what runs and what went wrong."""
    head = ("stage", "state", "elapsed", "nodes", "gpus", "restarts", "job", "note")
    rows = [head, *(_row(status) for status in statuses)]
    shown = [i for i in range(len(head)) if i == 1 or any(row[i] for row in rows[1:])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(row[i].ljust(widths[i]) for i in shown).rstrip() for row in rows]
    states = (State.QUEUED, State.STARTING, State.RUNNING, State.FAILED, State.DIED)
    for status in statuses:
        if status.state in states:
            lines.append(f"{status.stage}: log {status.log}")
            if status.mlflow_url or status.mlflow_run:
                lines.append(f"{status.stage}: MLflow {status.mlflow_url or status.mlflow_run}")
        lines += [f"{status.stage}: warning: {symptom}" for symptom in status.warnings]
    return "\n".join(lines)


def _row(status: StageStatus) -> tuple[str, ...]:
    elapsed = seconds(status.elapsed) if status.elapsed is not None else ""
    if status.limit and status.state == State.RUNNING:
        elapsed += f" of {seconds(status.limit)}"
    again = f"attempt {status.attempts}" if status.attempts > 1 else ""
    first_line = (status.error or "").split("\n", 1)[0]
    marks = describe_warnings(status.warnings)
    return (
        status.stage,
        status.state,
        elapsed,
        status.nodes or "",
        str(status.gpus or ""),
        str(status.restarts or ""),
        (status.job or "") if status.limit else "",
        "  ".join(filter(None, [status.reason, status.progress, again, first_line, marks])),
    )
