"""The status of every stage of the workspace, read without DVC's locks, so at any time.

A stage is up to date or not by what is in the workspace now. A job of the ledger is shown where it
belongs to that: with the same params, code and inputs. What earlier params left behind, numbers and
warnings as well, is not shown beside what is new.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipelines.base.console import ago, describe_warnings, seconds
from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.config.params import load_params
from pipelines.driver.activity import progress_of, why_it_waits
from pipelines.dvc_repo.plan import current_plan
from pipelines.dvc_repo.queue import QueuedExperiment
from pipelines.ledger.costs import Cost
from pipelines.ledger.entry import Attempt, Entry, Ledger
from pipelines.ledger.preflight import BadNode
from pipelines.ledger.state import PAUSED, State
from pipelines.runs.cost_table import hours
from pipelines.runs.current_jobs import CurrentJobs, StageJob
from pipelines.slurm.link import Link, unstarted_links
from pipelines.slurm.outcome import outcome_in_session, outcome_of
from pipelines.slurm.scheduler import Scheduler
from pipelines.slurm.spent import cost_of_entry
from pipelines.tracking.cursor import StageCursor
from pipelines.tracking.health import Health
from stages.contracts.catalog import bind_all
from stages.health import Symptom
from stages.reporting.markup import printable

UP_TO_DATE = "up to date"
RESTORED = "restored"
"""Up to date by DVC's cache: not what the last job of the stage in this clone has made."""
STALE = "stale"
"""It would run now."""
WAITING = "waiting"
"""It would run after others."""
UNKNOWN = "-"
AT_WORK = (State.RUNNING, State.SUSPENDED)
LIVE = ("RUNNING", "COMPLETING", *PAUSED)
"""Slurm's words for a job that has its nodes."""


@dataclass(frozen=True)
class StageStatus:
    """One line of `lockstep status`."""

    stage: str
    state: str
    iteration: str | None = None
    reason: str = ""
    """Why it is not up to date, or why Slurm has not started it."""
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
    bad_nodes: tuple[BadNode, ...] = ()
    """Nodes that its job leaves out, as they were found to be bad."""
    cost: Cost | None = None
    """What all attempts of its job took, where that was asked for."""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "cost": self.cost.as_json() if self.cost else None}


def stage_statuses(repository: Repository) -> list[StageStatus]:
    """Every stage of the graph under the current params, in order."""
    Scheduler(repository).refresh()
    nodes = {bound.address: bound for bound in bind_all(load_params(repository.root))}
    try:
        plan = current_plan(repository.root)
    except LockstepError:
        found = _newest_jobs(repository, list(nodes))
    else:
        jobs = CurrentJobs(repository, nodes)
        links = unstarted_links(repository)
        fresh = {planned.address for planned in plan if not planned.stale}
        found = {}
        for job in jobs.of(plan):
            name = job.planned.address
            link = links.get(name)
            if link and not jobs.is_wanted(name, *link.computes()):
                link = None
            found[name] = (job.entry, _of_stage(job, link, fresh))
    health = Health(repository.root)
    statuses = []
    for name in nodes:
        entry, status = found.get(name, (None, StageStatus(name, UNKNOWN)))
        shown = status.state not in (STALE, WAITING, UNKNOWN)
        warnings = health.of(name, entry) if shown else ()
        iteration = name.partition("@")[2] or None
        statuses.append(replace(status, iteration=iteration, warnings=warnings))
    return statuses


def with_costs(statuses: Sequence[StageStatus], *, only_gpus: bool) -> list[StageStatus]:
    """The same with what they took; of those on GPUs alone, since nobody pays for the others."""
    return [
        replace(status, cost=cost_of_entry(Attempt(Path(status.log)).entry))
        if status.log and (status.gpus or not only_gpus)
        else status
        for status in statuses
    ]


def _newest_jobs(
    repository: Repository, names: list[str]
) -> dict[str, tuple[Entry | None, StageStatus]]:
    """Where DVC cannot tell what the workspace is: the last job of each stage."""
    latest = Ledger(repository.jobs).latest()
    return {name: (latest[name], _of_entry(latest[name])) for name in names if name in latest}


def _of_stage(job: StageJob, link: Link | None, fresh: set[str]) -> StageStatus:
    planned, entry = job.planned, job.entry
    state = entry.state() if entry else State.NEW
    if entry and state.alive:
        return _of_entry(entry)
    if not planned.stale:
        made = _of_entry(entry) if entry and state is State.PUBLISHED else None
        made_here = made is not None and job.is_last
        base = made or StageStatus(planned.address, RESTORED)
        return replace(base, state=UP_TO_DATE if made_here else RESTORED)
    if link and _is_newer(link.attempt, entry):
        return _of_attempt(planned.address, link.attempt, link.attempt.state())
    # Published, and still in the ledger: DVC is about to record it.
    if entry and state is not State.NEW and (state is not State.PUBLISHED or entry.out.exists()):
        return _of_entry(entry)
    waits_for = [up for up in planned.upstream if up not in fresh]
    reasons = waits_for or planned.reasons
    reason = ", ".join(reasons[:2]) + (", ..." if len(reasons) > 2 else "")
    if waits_for:
        reason = f"after {reason}"
    if planned.cached:
        reason += "; DVC's cache has it"
    if job.other:
        number = job.other.attempts()[-1].job
        reason += f"; job {number} computes it from other params, code or inputs"
    return StageStatus(planned.address, WAITING if waits_for else STALE, reason=reason)


def _is_newer(link: Attempt, entry: Entry | None) -> bool:
    return entry is None or link.launched.time > entry.asked_for


def _of_entry(entry: Entry) -> StageStatus:
    current, state = entry.current, entry.state()
    if current is None:
        return StageStatus(entry.stage, state.value)
    cursor = StageCursor.of(entry)
    return replace(
        _of_attempt(entry.stage, current, state),
        progress=progress_of(entry) if state in AT_WORK else "",
        attempts=len(entry.attempts()),
        restarts=current.launched.restarts_before + current.restarts,
        mlflow_run=cursor.run_id,
        mlflow_url=cursor.url,
    )


def _of_attempt(stage: str, attempt: Attempt, state: State) -> StageStatus:
    launch, worker = attempt.launched, attempt.worker
    resources = launch.resources
    hosts = sorted({job.nodes for job in attempt.scheduler.jobs.values()} - {""})
    limit = 60.0 * resources.time_minutes if attempt.on_slurm else None
    return StageStatus(
        stage=stage,
        state=state.value,
        reason=why_it_waits(attempt) if state is State.QUEUED else "",
        elapsed=_elapsed(attempt, state),
        limit=limit,
        error=_error(attempt, state),
        attempts=1,
        job=launch.job or ",".join(attempt.jobs) or None,
        host=worker.host if worker else None,
        nodes=", ".join(hosts) or None,
        gpus=launch.gpus_per_job,
        log=str(attempt.folder),
        bad_nodes=attempt.bad_nodes,
    )


def _elapsed(attempt: Attempt, state: State) -> float | None:
    """Of a job on Slurm that runs, by Slurm's clock: its node's may be another than this host's."""
    worker, result = attempt.worker, attempt.result
    if state in AT_WORK and attempt.on_slurm:
        used = [job.used for job in attempt.scheduler.jobs.values() if job.state in LIVE]
        return max((value for value in used if value is not None), default=None)
    started = (result and result.started) or (worker and worker.time)
    ended = (result and result.ended) or (time.time() if state is State.RUNNING else None)
    return max(ended - started, 0.0) if started and ended else None


def _error(attempt: Attempt, state: State) -> str | None:
    if state not in (State.FAILED, State.CANCELLED, State.DIED):
        return None
    if attempt.on_slurm and attempt.result is None and not attempt.was_cancelled:
        return _outcome(attempt)
    if attempt.session and attempt.result is None and not attempt.was_cancelled:
        return outcome_in_session(attempt).what
    result = attempt.result
    return result.error if result else None


def _outcome(attempt: Attempt) -> str:
    """How its job ended and, where that alone would not end the stage, why nothing goes on."""
    outcome, launch = outcome_of(attempt), attempt.launched
    most = launch.resources.requeues
    if outcome.try_again and launch.restarts_before + attempt.restarts >= most:
        return f"{outcome.what}; its profile allows no more restarts (requeues: {most})"
    return outcome.what


def render(statuses: list[StageStatus]) -> str:
    """A table for people; below it, where to look at what runs and what went wrong."""
    head = ("stage", "state", "elapsed", "nodes", "gpus", "GPU-hours", "restarts", "job", "note")
    rows = [head, *(_row(status) for status in statuses)]
    shown = [i for i in range(len(head)) if i == 1 or any(row[i] for row in rows[1:])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(row[i].ljust(widths[i]) for i in shown).rstrip() for row in rows]
    states = (State.QUEUED, State.STARTING, *AT_WORK, State.FAILED, State.DIED)
    for status in statuses:
        if status.state in states:
            lines += [f"{status.stage}: left out bad node {bad}" for bad in status.bad_nodes]
            lines.append(f"{status.stage}: log {status.log}")
            if status.mlflow_url or status.mlflow_run:
                lines.append(f"{status.stage}: MLflow {status.mlflow_url or status.mlflow_run}")
        lines += [f"{status.stage}: warning: {symptom}" for symptom in status.warnings]
    return "\n".join(lines)


def render_queue(queue: Sequence[QueuedExperiment]) -> str:
    """DVC's queue, a line for each experiment with what is different about it."""
    states = max(len(each.state) for each in queue)
    names = max(len(each.name) for each in queue)
    lines = []
    for each in queue:
        changes = ", ".join(f"{key}={value}" for key, value in each.changes.items())
        line = f"  {each.state:<{states}}  {each.name:<{names}}  {ago(each.created)}  {changes}"
        lines.append(printable(" ".join(line.splitlines())).rstrip())
    waiting = any(each.state == "queued" for each in queue)
    idle = waiting and not any(each.state == "running" for each in queue)
    return "\n".join(["experiments", *lines, *(["`dvc queue start` runs them"] if idle else [])])


def _row(status: StageStatus) -> tuple[str, ...]:
    elapsed = seconds(status.elapsed) if status.elapsed is not None else ""
    if elapsed and status.limit and status.state in AT_WORK:
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
        _gpu_hours(status.cost),
        str(status.restarts or ""),
        (status.job or "") if status.limit else "",
        "  ".join(filter(None, [status.reason, status.progress, again, first_line, marks])),
    )


def _gpu_hours(cost: Cost | None) -> str:
    if cost is None or not cost.held.gpu_hours:
        return ""
    lost = f" ({hours(cost.lost.gpu_hours)} lost)" if cost.lost.gpu_hours else ""
    return hours(cost.held.gpu_hours) + lost
