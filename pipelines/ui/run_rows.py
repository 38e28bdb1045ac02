"""The rows of the Run page: the status of every stage with what a person would ask next.

A row is a mapping that goes to the page as it is. What moves while a job runs (its progress, its
warnings) is read for the live rows alone, so that looking again costs little.
"""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.base import atomic
from pipelines.dvc_repo.graph import Node
from pipelines.identity.code import CODE_STAGE
from pipelines.ledger.entry import Attempt, Entry
from pipelines.ledger.state import State
from pipelines.runs.status import AT_WORK, RESTORED, UP_TO_DATE, StageStatus
from pipelines.slurm.outcome import outcome_here, outcome_in_session, outcome_of
from pipelines.tracking.health import Health
from stages.health import Symptom

Row = dict[str, Any]

LIVE = tuple(state.value for state in State if state.alive)
ENDED_BADLY = (State.FAILED.value, State.DIED.value)
SAME_START_S = 3.0
"""Two readings of when a job began that differ by less are the same."""


def row_of(status: StageStatus, node: Node | None, before: Row | None) -> Row:
    """A stage as the page shows it; `before` is its row of the last look."""
    row: Row = {
        "stage": status.stage,
        "state": status.state,
        "iteration": status.iteration,
        "reason": status.reason,
        "needs": [name for name in node.upstream if name != CODE_STAGE] if node else [],
        "elapsed": status.elapsed,
        "limit": status.limit,
        "error": status.error,
        "advice": None,
        "attempts": status.attempts,
        "restarts": status.restarts,
        "job": status.job,
        "where": status.nodes or status.host,
        "gpus": status.gpus,
        "mlflow": status.mlflow_url,
        "log": status.log,
        "warnings": [warning(symptom) for symptom in status.warnings],
        "progress": None,
        "since": None,
    }
    if status.state in LIVE and status.elapsed is not None:
        row["since"] = time.time() - status.elapsed
        known = before and before["since"]
        if known and abs(known - row["since"]) < SAME_START_S:
            row["since"] = known
        row["elapsed"] = None
    if status.state == State.QUEUED and status.log:
        launch = Attempt(Path(status.log)).launch
        row["since"] = launch.time if launch else None
    if status.state in ENDED_BADLY and status.log:
        row |= _outcome(Attempt(Path(status.log)))
    elif status.state == State.CANCELLED:
        row["advice"] = "progress is saved: run again to continue"
    entry = entry_of(row)
    return {**row, "progress": progress(entry)} if entry and status.state in AT_WORK else row


def moved(row: Row, health: Health) -> Row:
    """A live row with its progress and warnings of now; the same one if nothing has moved."""
    entry = entry_of(row)
    if entry is None or row["state"] not in AT_WORK:
        return row
    warnings = [warning(symptom) for symptom in health.of(row["stage"], entry)]
    new = {**row, "progress": progress(entry), "warnings": warnings}
    return row if new == row else new


def standing(row: Row) -> tuple[object, ...]:
    """What a job has to say of its state: where it differs, the row is to be made anew."""
    if not row["log"]:
        return ()
    attempt, entry = Attempt(Path(row["log"])), entry_of(row)
    whole = (entry.state(), len(entry.attempts())) if entry else ()
    return (attempt.state(), attempt.restarts, *whole)


def may_move(row: Row) -> bool:
    """Whether its job may change its state, or be submitted again."""
    return row["log"] is not None and row["state"] not in (UP_TO_DATE, RESTORED)


def entry_of(row: Mapping[str, Any]) -> Entry | None:
    """The ledger's entry behind a row; a job that waits in a chain has none yet."""
    if not row["log"]:
        return None
    entry = Attempt(Path(row["log"])).entry
    return entry if (entry.folder / "spec.json").is_file() else None


def progress(entry: Entry) -> Row | None:
    """What its job counts, how far it is, and how many seconds are left by its rate."""
    report = atomic.read_json(entry.folder / "progress.json")
    if not report:
        return None
    done, total, rate = report["done"], report["total"], report["rate"]
    left = (total - done) / rate if rate and done < total else None
    known = {key: report[key] for key in ("phase", "done", "total", "rate")}
    return {**known, "left": left, "numbers": finite(report["numbers"])}


def finite(numbers: Mapping[str, float]) -> dict[str, float]:
    """Those that JSON can hold."""
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def warning(symptom: Symptom) -> Row:
    return {
        "kind": symptom.kind.words,
        "metric": symptom.metric,
        "threshold": symptom.threshold,
        "sentence": symptom.sentence,
        "advice": symptom.advice,
    }


def _outcome(attempt: Attempt) -> Row:
    if attempt.on_slurm:
        outcome = outcome_of(attempt)
    elif attempt.session:
        outcome = outcome_in_session(attempt)
    else:
        outcome = outcome_here(attempt)
    return {"error": outcome.what, "advice": outcome.advice}
