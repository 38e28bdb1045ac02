"""What a stage is doing at this moment, for the line that changes in place."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pipelines.base import atomic
from pipelines.base.console import describe_warnings
from pipelines.ledger.entry import Attempt, Entry
from pipelines.ledger.state import State
from stages.progress import describe

if TYPE_CHECKING:
    from stages.health import Symptom


def activity(entry: Entry, state: State, warnings: "Iterable[Symptom]" = ()) -> str:
    """Progress with its warnings, why Slurm has not started it, or what comes after the job."""
    match state:
        case State.QUEUED:
            current = entry.current
            reason = why_it_waits(current) if current else ""
            return f"queued ({reason})" if reason else "queued"
        case State.RUNNING:
            # Warnings come first: a narrow terminal cuts the end.
            marks, progress = describe_warnings(warnings), progress_of(entry) or "starting"
            return f"{marks}  {progress}" if marks else progress
        case State.NEW:
            return "starting"
        case State.COMPLETED:
            return "done; publishing its outputs"
        case State.PUBLISHED:
            return "done; DVC records it"
        case State.SUSPENDED:
            return "  ".join(filter(None, ["suspended by Slurm", progress_of(entry)]))
        case _:
            return state.value


def progress_of(entry: Entry) -> str:
    """How far its job is; nothing before the job has said so, since it was last started."""
    report = atomic.read_json(entry.folder / "progress.json")
    return describe(report) if report else ""


def why_it_waits(attempt: Attempt) -> str:
    """Slurm's own word for it, with what to do about a job that waits for ever."""
    waiting = [job for job in attempt.scheduler.jobs.values() if job.reason]
    held = [job.id for job in waiting if "held" in job.reason.lower()]
    reasons = ", ".join(sorted({job.reason for job in waiting}))
    if "BadConstraints" in reasons and (bad := attempt.bad_nodes):
        nodes = ", ".join(each.node for each in bad)
        return f"{reasons}; too few nodes without {nodes}, which are bad: lockstep cancel ends it"
    return f"{reasons}; scontrol release {held[0]}" if held else reasons
