"""Jobs on Slurm: submitted by submitit, followed and cancelled by Slurm's own commands."""

import time
from contextlib import suppress

from pipelines.base.repository import Repository
from pipelines.ledger.entry import Attempt
from pipelines.ledger.launch import Launch
from pipelines.slurm.queue import SlurmSilent
from pipelines.slurm.scheduler import Scheduler
from pipelines.slurm.submit import Pause, submit_batches

CANCEL_S = 60.0


class SlurmExecutor:
    """submitit's Slurm executor: sbatch, and Slurm does the rest."""

    def leaves_jobs(self, attempt: Attempt) -> bool:  # noqa: ARG002
        return True

    def __init__(self, repository: Repository) -> None:
        self._scheduler = Scheduler(repository)

    def submit(self, attempt: Attempt, pause: Pause) -> Launch:
        return submit_batches(
            self._scheduler, attempt.entry.stage, attempt.folder, attempt.launched, pause=pause
        )

    def never_had(self, attempt: Attempt) -> bool:
        if not attempt.state().alive or attempt.jobs or attempt.is_being_submitted():
            return False
        return not self._scheduler.tokens_of([attempt.folder])

    def refresh(self, *, now: bool = False) -> None:
        self._scheduler.refresh(now=now)

    def trouble(self) -> str | None:
        return self._scheduler.silence()

    def cancel(self, attempt: Attempt) -> bool:
        """Until the jobs are gone, or Slurm takes longer than anybody wants to wait."""
        deadline = time.monotonic() + CANCEL_S
        while time.monotonic() < deadline:
            with suppress(SlurmSilent):
                self._scheduler.cancel(attempt.jobs)
                self._scheduler.refresh(now=True)
                if attempt.left_slurm:
                    return True
            time.sleep(1.0)
        return False
