"""How often Slurm may start a job again, and how a job that was told to stop asks for it.

A stage that stops before it is done has saved its scratch; it leaves a mark, on which the batch
script puts the job back into the queue. Restarts are counted over all attempts at the stage.
"""

from typing import Any

from pipelines.ledger.entry import Attempt, State, TaskState
from pipelines.ledger.task import Task
from pipelines.slurm.script import REQUEUE_MARK
from stages.context import StageError


def refuse_endless_restarts(launch: dict[str, Any], task: Task) -> None:
    restarts, most = _restarts(launch, task), launch["resources"]["requeues"]
    if task.job is not None and restarts > most:
        raise StageError(
            f"Slurm has started this job again {restarts} times, and its profile allows {most} "
            "(requeues); what is done is kept: run the same command to go on"
        )


def stop_or_requeue(attempt: Attempt, launch: dict[str, Any], task: Task) -> dict[str, Any]:
    """What becomes of a stage that was told to stop, and did."""
    if attempt.session is not None and not attempt.was_cancelled:
        error = "its session ended; it stopped at a step boundary"
        return {"state": State.FAILED, "error": error, "retryable": True}
    if task.job is None or attempt.was_cancelled:
        error = "stopped at a step boundary"
        return {"state": State.CANCELLED, "error": error, "retryable": True}
    resources = launch["resources"]
    if _restarts(launch, task) >= resources["requeues"]:
        return {
            "state": State.FAILED,
            "error": (
                "Slurm ended the job, by preemption or at its time limit of "
                f"{resources['time_minutes']} minutes, and its profile allows no more restarts "
                f"(requeues: {resources['requeues']}). What is done is kept: run the same command "
                "to go on, or raise requeues or time_minutes"
            ),
            "retryable": False,
        }
    (attempt.folder / f"{REQUEUE_MARK}{task.job}.{task.restart}").touch()
    print("stopped at a step boundary, to go on after a restart", flush=True)
    return {"state": TaskState.STOPPED}


def _restarts(launch: dict[str, Any], task: Task) -> int:
    return int(launch.get("restarts_before", 0)) + task.restart
