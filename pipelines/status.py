"""How every stage fares, read off the ledger, so that it works while DVC holds its locks."""

import time
from dataclasses import asdict, dataclass
from typing import Any

from pipelines import atomic
from pipelines.console import describe_progress, seconds
from pipelines.ledger import Entry, Ledger, State
from pipelines.params import load_params
from pipelines.publish import recorded_outs
from pipelines.repository import Repository
from stages.contracts.catalog import bind_all

RECORDED = "recorded"
"""dvc.lock has the stage's outputs, made by a job that this clone knows nothing of."""
ABSENT = "-"


@dataclass(frozen=True)
class StageStatus:
    """One line of `lockstep status`."""

    stage: str
    state: str
    elapsed: float | None = None
    progress: str = ""
    error: str | None = None
    attempts: int = 0
    job: str | None = None
    host: str | None = None
    mlflow_run: str | None = None
    mlflow_url: str | None = None
    log: str | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def stage_statuses(repository: Repository) -> list[StageStatus]:
    """Every stage of the graph under the current params, in order."""
    latest = Ledger(repository.jobs).latest()
    recorded = recorded_outs(repository.root)
    statuses = []
    for bound in bind_all(load_params(repository.root)):
        entry = latest.get(bound.address)
        if entry is not None:
            statuses.append(_status(entry))
        else:
            known = RECORDED if bound.address in recorded else ABSENT
            statuses.append(StageStatus(bound.address, known))
    return statuses


def _status(entry: Entry) -> StageStatus:
    attempts = entry.attempts()
    attempt = attempts[-1] if attempts else None
    state = entry.state()
    launch = (attempt.launch if attempt else None) or {}
    worker = (attempt.worker if attempt else None) or {}
    result = (attempt.result if attempt else None) or {}
    started = result.get("started") or worker.get("time")
    ended = result.get("ended") or (time.time() if state.alive else None)
    tracking = atomic.read_json(entry.folder / "tracking.json") or {}
    progress = atomic.read_json(entry.folder / "progress.json") if state is State.RUNNING else None
    return StageStatus(
        stage=entry.stage,
        state=state.value,
        elapsed=ended - started if started and ended else None,
        progress=describe_progress(progress, started or 0) if progress else "",
        error=result.get("error") if state in (State.FAILED, State.CANCELLED) else None,
        attempts=len(attempts),
        job=launch.get("job"),
        host=worker.get("host"),
        mlflow_run=tracking.get("run_id"),
        mlflow_url=tracking.get("url"),
        log=str(attempt.folder) if attempt else None,
    )


def render(statuses: list[StageStatus]) -> str:
    """A table for people."""
    width = max(len(status.stage) for status in statuses)
    lines = [f"{'stage':<{width}}  {'state':<10}  {'elapsed':>11}  note"]
    for status in statuses:
        elapsed = seconds(status.elapsed) if status.elapsed is not None else ""
        again = f"attempt {status.attempts}" if status.attempts > 1 else ""
        first_line = (status.error or "").split("\n", 1)[0]
        note = "  ".join(filter(None, [status.progress, again, first_line]))
        lines.append(f"{status.stage:<{width}}  {status.state:<10}  {elapsed:>11}  {note}".rstrip())
    return "\n".join(lines)
