"""Handing work to sbatch: whole submissions, tried again while slurmctld is away."""

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.base.redact import redact
from pipelines.config.profiles import Resources
from pipelines.ledger.entry import Entry
from pipelines.ledger.launch import Launch
from pipelines.ledger.preflight import exclude_flag
from pipelines.ledger.state import State, TaskState
from pipelines.slurm.link import is_link
from pipelines.slurm.queue import SlurmSilent, max_array_size, my_jobs
from pipelines.slurm.scheduler import Scheduler
from pipelines.slurm.script import COMMENT_PREFIX, Batch, batch_script, command_of, parameters_of

Pause = Callable[[str], None]
"""Called with what Slurm said before sbatch is tried again; may give up by raising."""
SUBMIT_S, SUBMIT_AGAIN_S = 600.0, 3.0
_PASSING = re.compile(
    r"contact slurm controller|timed out|temporarily|Zero Bytes|authenticat|munge", re.IGNORECASE
)
"""What sbatch says when the controller is away, or munged is, not when it refuses."""
_FULL = re.compile(r"MaxSubmit", re.IGNORECASE)
"""What it says when as many jobs wait as may wait: there is room when one has ended."""


def missing_shards(entry: Entry, launch: Launch) -> tuple[int, ...] | None:
    """For a stage that is an array of jobs: the shards that are not done; else None."""
    count, each = launch.num_shards, launch.tasks_per_job
    if count == 1:
        return None
    done = {
        task.shard
        for attempt in entry.attempts()
        for task in attempt.tasks
        if task.num_shards == count * each and task.state in (TaskState.DONE, State.COMPLETED)
    }
    missing = [n for n in range(count) if not done.issuperset(range(n * each, (n + 1) * each))]
    # Where all are done and nobody has written the outputs, part of the work was damaged since.
    return tuple(missing or range(count))


def slurm_batches(
    stage: str,
    folder: Path,
    token: str,
    launch: Launch,
    *,
    behind: Sequence[str] = (),
    succeeds: str | None = None,
) -> list[Batch]:
    """The calls of sbatch that a submission needs: one, or several where an array is too large."""
    whole = Batch(
        stage=stage,
        folder=folder,
        resources=_excluding(launch),
        token=token,
        code=launch.code,
        root=launch.clone,
        behind=behind,
        succeeds=succeeds,
        chained=is_link(folder),
        module=launch.module,
    )
    if launch.shards is None:
        return [whole]
    largest = max_array_size()
    if not largest:
        raise LockstepError(
            f"{stage}: this cluster runs no arrays of jobs (MaxArraySize 0): set `shards` to 1 in "
            "the profile"
        )
    chunks: dict[int, list[int]] = {}
    for shard in launch.shards:
        chunks.setdefault(shard // largest, []).append(shard)
    each, rest = divmod(launch.resources.array_parallelism, len(chunks))
    return [
        replace(
            whole,
            shards=chunk,
            first_shard=number * largest,
            parallelism=max(each + (place < rest), 1),
        )
        for place, (number, chunk) in enumerate(chunks.items())
    ]


def _excluding(launch: Launch) -> Resources:
    """The profile's resources, without the nodes that turned out to be bad."""
    excluded = exclude_flag(launch.resources.exclude, launch.excluded)
    return launch.resources.model_copy(update={"exclude": excluded})


def submit_batches(
    scheduler: Scheduler,
    stage: str,
    folder: Path,
    launch: Launch,
    *,
    behind: Sequence[str] = (),
    succeeds: str | None = None,
    pause: Pause,
) -> Launch:
    """Make a submission, all of it or none; the launch with its jobs."""
    token = scheduler.register(folder)
    jobs: list[str] = []
    try:
        batches = slurm_batches(stage, folder, token, launch, behind=behind, succeeds=succeeds)
        for place, batch in enumerate(batches):
            # Where even one task of each array were too many at once, an array waits for another.
            ahead = place - batch.resources.array_parallelism
            ready = replace(batch, behind=[*behind, jobs[ahead]]) if ahead >= 0 else batch
            jobs.append(submit_batch(ready, known=jobs, pause=pause))
    except BaseException:
        # Looks go on until its jobs are known to be gone: Slurm may have taken one unheard.
        scheduler.submitted(token, folder)
        with suppress(SlurmSilent):
            mark = f"{COMMENT_PREFIX}{token}"
            scheduler.cancel([*jobs, *(job.number for job in my_jobs() if job.comment == mark)])
        raise
    scheduler.submitted(token, folder)
    return replace(launch, job=",".join(jobs), jobs=tuple(jobs), token=token)


def submit_batch(batch: Batch, *, known: Sequence[str] = (), pause: Pause) -> str:
    """Hand one script to sbatch; the number of the job.

    While slurmctld is away, sbatch is tried again, unless its last try did arrive: then Slurm
    shows a job with this token that is not among those `known`.
    """
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    executor = _sbatch(batch)
    deadline = time.monotonic() + SUBMIT_S
    while True:
        try:
            with _environment_of_jobs(batch):
                return str(executor._submit_command(command_of(batch)).job_id)
        except (FailedJobError, FailedSubmissionError) as error:
            answer = redact(str(error).strip())
        gives_up = not _PASSING.search(answer) or time.monotonic() > deadline
        if gives_up and not _FULL.search(answer):
            without = f", without {left_out}" if (left_out := batch.resources.exclude) else ""
            raise LockstepError(
                f"{batch.stage}: sbatch refused the job{without}: {answer}\n"
                "see partition, account, qos, time_minutes and the like in the profile, and "
                "`sinfo`; `--dry-run` shows the script"
            )
        lines = answer.splitlines()
        pause(next(filter(_FULL.search, lines), lines[-1]))
        with suppress(SlurmSilent):
            arrived = {job.number for job in my_jobs() if job.comment == batch.comment}
            if arrived - set(known):
                return (arrived - set(known)).pop()


def refusal(batch: Batch) -> str | None:
    """Why sbatch would not take this script; it is asked, and submits nothing."""
    with _environment_of_jobs(batch):
        done = subprocess.run(
            ["sbatch", "--test-only"],
            input=batch_script(batch),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    lines = redact(done.stderr.strip() or done.stdout.strip()).splitlines()
    return (lines or ["sbatch failed"])[-1] if done.returncode else None


def _sbatch(batch: Batch) -> Any:
    """submitit's executor, which takes for the job's number what sbatch says it is.

    A site's own sbatch may print more, the numbers of other jobs among it.
    """
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedSubmissionError

    class Sbatch(SlurmExecutor):  # type: ignore[misc]
        def _make_submission_command(self, submission_file_path: Path) -> list[str]:
            return ["sbatch", "--parsable", str(submission_file_path)]

        @staticmethod
        def _get_job_id_from_submission_command(string: bytes | str) -> str:
            text = string if isinstance(string, str) else string.decode()
            alone = [line.strip().partition(";")[0] for line in text.splitlines()]
            numbers = [word for word in alone if word.isdigit()]
            if len(numbers) != 1:
                mine = {job.number for job in my_jobs() if job.comment == batch.comment}
                numbers = [number for number in numbers if number in mine]
            if len(numbers) != 1:
                raise FailedSubmissionError(f"sbatch does not say the job's number: {text.strip()}")
            return numbers[0]

    executor = Sbatch(batch.folder)
    executor.parameters = parameters_of(batch)
    return executor


def just_wait(_: str) -> None:
    """A pause in which nobody has to be heeded."""
    time.sleep(SUBMIT_AGAIN_S)


_STAYS_HERE = ("MLFLOW_", "PREFECT_", "DVC_", "LOCKSTEP_", "SLURM_")
"""sbatch hands the whole environment to the job: what only the control plane needs stays behind,
credentials above all, and so does what describes a job that this process may itself run in."""
_OF_THE_USER = ("SLURM_CONF", "SLURM_CLUSTERS")
"""Which Slurm all of its commands speak to, ours as well."""
_OPEN = ("account", "clusters", "constraint", "partition", "qos", "reservation")
"""Where jobs of this user go unless the profile says so. sbatch would heed any variable SBATCH_*
rather than the script: all others would change what the profile, or the worker's end, rests on."""


def stays_here(variable: str) -> bool:
    """Whether a variable of this command is none of a job's business."""
    return variable.startswith(_STAYS_HERE) and variable not in _OF_THE_USER


def _contradicts(variable: str, batch: Batch) -> bool:
    """Whether sbatch would heed a variable rather than the script."""
    key = variable.removeprefix("SBATCH_").lower()
    by_profile = getattr(batch.resources, key, None) or key in batch.resources.extra
    return variable.startswith("SBATCH_") and bool(by_profile or key not in _OPEN)


@contextmanager
def _environment_of_jobs(batch: Batch) -> Iterator[None]:
    before = dict(os.environ)
    for name in before:
        if stays_here(name) or _contradicts(name, batch):
            del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(before)
