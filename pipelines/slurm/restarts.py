"""How often Slurm may start a job again, and how a job that was told to stop asks for it.

A stage that stops before it is done has saved its scratch; it leaves a mark, on which the batch
script puts the job back into the queue. Restarts are counted over all attempts at the stage.
"""

from pipelines.ledger.entry import Attempt
from pipelines.ledger.launch import Launch
from pipelines.ledger.reports import Result
from pipelines.ledger.state import State, TaskState
from pipelines.ledger.task import Task
from pipelines.slurm.script import REQUEUE_MARK
from stages.context import StageError


def refuse_endless_restarts(launch: Launch, task: Task) -> None:
    restarts, most = launch.restarts_before + task.restart, launch.resources.requeues
    if task.job is not None and restarts > most:
        raise StageError(
            f"Slurm has started this job again {restarts} times, and its profile allows {most} "
            "(requeues); progress is saved: run the same command to continue"
        )


def stop_or_requeue(attempt: Attempt, task: Task) -> Result:
    """What becomes of a stage that was told to stop, and did."""
    if attempt.session is not None and not attempt.was_cancelled:
        error = "its session ended; it stopped at a step boundary"
        return Result(state=State.FAILED, error=error, retryable=True)
    if task.job is None or attempt.was_cancelled:
        error = "stopped at a step boundary"
        return Result(state=State.CANCELLED, error=error, retryable=True)
    launch = attempt.launched
    resources = launch.resources
    if launch.restarts_before + task.restart >= resources.requeues:
        return Result(
            state=State.FAILED,
            error=(
                "Slurm ended the job, by preemption or at its time limit of "
                f"{resources.time_minutes} minutes, and its profile allows no more restarts "
                f"(requeues: {resources.requeues}). Progress is saved: run the same command "
                "to continue, or raise requeues or time_minutes"
            ),
        )
    (attempt.folder / f"{REQUEUE_MARK}{task.job}.{task.restart}").touch()
    print("stopped at a step boundary, to go on after a restart", flush=True)
    return Result(state=TaskState.STOPPED)
