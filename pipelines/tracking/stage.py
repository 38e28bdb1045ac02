"""One entry of the ledger as one MLflow run, however many attempts it took.

Sent in an order that leaves a true picture whenever it breaks off: who it is, its metrics, how it
ended, and only then its files, which may lie elsewhere and be slow.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.base import atomic
from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.identity.spec import Spec
from pipelines.ledger.entry import Attempt, Entry
from pipelines.ledger.record import Origin
from pipelines.ledger.state import State
from pipelines.slurm.spent import cost_of_entry
from pipelines.tracking.cost import cost_metrics
from pipelines.tracking.cursor import StageCursor, entry_identity, invocation_of
from pipelines.tracking.metrics import (
    START,
    STEP_PREFIX,
    Place,
    Point,
    batches,
    rows_after,
    safe_name,
    summary_of,
)

if TYPE_CHECKING:
    from pipelines.tracking.store import Store

LARGEST_LOG = 4 * 1024 * 1024
_SHOWN_WHOLE = ("report",)
"""Stages whose outputs are made to be looked at, and go into the run as they are."""

STATUS = {
    State.QUEUED: "SCHEDULED",
    State.STARTING: "RUNNING",
    State.RUNNING: "RUNNING",
    State.SUSPENDED: "RUNNING",
    State.COMPLETED: "FINISHED",
    State.PUBLISHED: "FINISHED",
    State.FAILED: "FAILED",
    State.DIED: "FAILED",
    State.CANCELLED: "KILLED",
}


class StageShipper:
    """Ships entries into their runs."""

    def __init__(self, repository: Repository, store: "Store") -> None:
        self._repository = repository
        self._store = store
        self._places: dict[Path, Place] = {}
        """Up to where the metrics of an entry are shipped, where this process knows for sure."""

    def ship(self, entry: Entry, state: State, parent: str) -> StageCursor:
        """Bring the entry's run up to date; raises the store's errors with the cursor saved."""
        cursor = StageCursor.of(entry, self._store.address)
        # Read before the files: what the job writes from now on is sent the next time.
        attempts = entry.attempts()
        if cursor.run_id is None:
            self._start(entry, cursor, parent)
        if not cursor.described:
            self._describe(entry.spec, cursor)
        self._ship_steps(entry, cursor)
        self._ship_state(entry, state, attempts, parent, cursor)
        self._ship_tables(entry, cursor)
        ended = attempts if not state.alive else attempts[:-1]
        self._ship_logs(ended, cursor)
        if not state.alive and not cursor.done:
            self._ship_files(entry, cursor)
            cursor.done = True
            cursor.save()
        return cursor

    def _start(self, entry: Entry, cursor: StageCursor, parent: str) -> None:
        spec = entry.spec
        tags = {
            "mlflow.parentRunId": parent,
            "lockstep.kind": "stage",
            "lockstep.stage": spec.name,
            "lockstep.address": spec.stage,
            "lockstep.iteration": iteration_of(spec),
            "lockstep.fingerprint": spec.fingerprint,
            "lockstep.code": spec.code,
            **origin_tags(entry.origin),
        }
        identity = ("lockstep.entry", entry_identity(entry))
        self._store.attach(cursor, identity, spec.stage, tags, started_at(entry))
        self._places.pop(entry.folder, None)
        cursor.save()

    def _describe(self, spec: Spec, cursor: StageCursor) -> None:
        self._store.set_params(cursor.run, flat_params(spec.config))
        inputs = [(name, item.path, item.hash) for name, item in spec.inputs.items()]
        self._store.set_inputs(cursor.run, inputs)
        cursor.described = True
        cursor.save()

    def _ship_steps(self, entry: Entry, cursor: StageCursor) -> None:
        """Send the steps past the last one sent; those that a resumed job repeats are equal."""
        before = self._places.get(entry.folder)
        rows, place = rows_after(before or START, entry.folder / "metrics.jsonl")
        last = cursor.step
        new = [row for row in rows if last is None or row["step"] > last]
        seen: dict[str, int] = {}
        if new and before is None:
            # A kill may have come between MLflow's answer and the cursor.
            seen = self._store.last_steps(cursor.run, STEP_PREFIX)
        for batch in batches(new):
            points = chain.from_iterable(_points(row, seen) for row in batch)
            self._store.log(cursor.run, list(points))
            cursor.step = batch[-1]["step"]
            cursor.save()
        self._places[entry.folder] = place

    def _ship_state(
        self, entry: Entry, state: State, attempts: list[Attempt], parent: str, cursor: StageCursor
    ) -> None:
        if cursor.state == state and cursor.attempts == len(attempts):
            return
        tags = {"mlflow.parentRunId": parent, **_state_tags(entry, state, attempts)}
        self._store.set_tags(cursor.run, tags)
        ended = None if state.alive else ended_at(entry)
        if state in (State.COMPLETED, State.PUBLISHED):
            summary = summary_of(self._repository.root, entry)
            points = [Point(name, value, ended or 0.0, 0) for name, value in summary.items()]
            self._store.log(cursor.run, points)
        if not state.alive and state is not State.COMPLETED:
            self._store.log(cursor.run, _cost_points(entry, ended or 0.0, len(attempts)))
        self._store.set_status(cursor.run, STATUS[state], ended)
        cursor.state, cursor.attempts = state.value, len(attempts)
        cursor.done, cursor.problem = False, None
        cursor.save()

    def _ship_tables(self, entry: Entry, cursor: StageCursor) -> None:
        paths = {path.stem: path for path in sorted((entry.folder / "tables").glob("*.json"))}
        stamps = {name: path.stat().st_mtime_ns for name, path in paths.items()}
        if stamps == cursor.tables:
            return
        changed = {
            name: atomic.load_json(path)
            for name, path in paths.items()
            if cursor.tables.get(name) != stamps[name]
        }
        self._store.put_tables(cursor.run, changed)
        self._store.list_tables(cursor.run, stamps)
        cursor.tables = stamps
        cursor.save()

    def _ship_logs(self, ended: list[Attempt], cursor: StageCursor) -> None:
        for attempt in ended[cursor.logs :]:
            for path in attempt.logs():
                name = f"logs/attempt_{attempt.number:03}/{path.name}"
                self._store.put_text(cursor.run, name, _log_text(path))
            cursor.logs = attempt.number
            cursor.save()

    def _ship_files(self, entry: Entry, cursor: StageCursor) -> None:
        spec = entry.spec
        self._store.put_yaml(cursor.run, "config.yaml", spec.config)
        for name in ("spec.json", "record.json"):
            path = entry.folder / name
            if path.exists():
                self._store.put_text(cursor.run, name, path.read_text(encoding="utf-8"))
        if spec.name in _SHOWN_WHOLE and entry.record is not None:
            for name in spec.outs:
                folder = place_of(self._repository, entry, name)
                if folder.is_dir():
                    self._store.put_folder(cursor.run, name, folder)


def _cost_points(entry: Entry, ended: float, attempts: int) -> list[Point]:
    """What all attempts took: a step for each that ended, of which MLflow shows the last one."""
    try:
        metrics = cost_metrics(cost_of_entry(entry))
    except LockstepError:
        return []  # `lockstep cost` names the damaged file; the run's results are none the worse
    return [Point(name, value, ended, attempts) for name, value in metrics.items()]


def _points(row: Mapping[str, Any], seen: Mapping[str, int]) -> list[Point]:
    named = {STEP_PREFIX + safe_name(name): value for name, value in row["metrics"].items()}
    return [
        Point(name, float(value), row["time"], row["step"])
        for name, value in named.items()
        if row["step"] > seen.get(name, -1)
    ]


def origin_tags(origin: Origin) -> dict[str, str | None]:
    return {
        "mlflow.source.name": "lockstep",
        "mlflow.source.git.commit": origin.git_commit,
        "lockstep.git_commit": origin.git_commit,
        "lockstep.dvc_experiment": origin.experiment,
    }


def _state_tags(entry: Entry, state: State, attempts: list[Attempt]) -> dict[str, str | None]:
    result = attempts[-1].result if attempts else None
    outs = entry.outs
    return {
        "lockstep.invocation": invocation_of(entry).id,
        "lockstep.state": state.value,
        "lockstep.attempts": str(len(attempts)),
        **{f"lockstep.{name}": value for name, value in where_it_runs(attempts).items()},
        "lockstep.error": result.error if result else None,
        "lockstep.output_hash": " ".join(outs[path] for path in sorted(outs)) or None,
        **{f"lockstep.out.{path}": digest for path, digest in outs.items()},
    }


def where_it_runs(attempts: list[Attempt]) -> dict[str, str | None]:
    """What is known of the last attempt's job."""
    launch, worker = (attempts[-1].launch, attempts[-1].worker) if attempts else (None, None)
    return {
        "profile": launch.profile if launch else None,
        "executor": launch.executor if launch else None,
        "job": launch.job if launch else None,
        "host": worker.host if worker else None,
    }


def iteration_of(spec: Spec) -> str | None:
    """The iteration that a stage is bound to, if it is repeated over them."""
    return spec.key if "@" in spec.stage else None


def place_of(repository: Repository, entry: Entry, name: str) -> Path:
    """Where an output is: in the entry until DVC has recorded it, then in the workspace."""
    kept = entry.out / name
    return kept if kept.exists() else repository.root / entry.spec.outs[name]


def started_at(entry: Entry) -> float:
    """When the first attempt was submitted."""
    attempts = entry.attempts()
    launch = attempts[0].launch if attempts else None
    return (launch and launch.time) or entry.origin.created


def ended_at(entry: Entry) -> float:
    """When the last attempt ended; for one that reported nothing, its last change of a file."""
    attempts = entry.attempts()
    end = entry.record or (attempts[-1].result if attempts else None)
    if end and end.ended is not None:
        return end.ended
    paths = [entry.folder / "metrics.jsonl", entry.folder / "progress.json"]
    paths += attempts[-1].folder.iterdir() if attempts else []
    changes = []
    for path in paths:
        with suppress(FileNotFoundError):
            changes.append(path.stat().st_mtime)
    return max(changes, default=started_at(entry))


def flat_params(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A nested configuration under dotted names, as text."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flat_params(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value if isinstance(value, str) else json.dumps(value)
    return flat


def _log_text(path: Path) -> str:
    """A log, or the end of a very long one."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - LARGEST_LOG))
        text = file.read().decode(errors="replace")
    left_out = max(0, size - LARGEST_LOG)
    return f"[{left_out} bytes before this left out]\n{text}" if left_out else text
