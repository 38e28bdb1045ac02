"""The shipper's process: MLflow is brought up to date, and finished policies are registered.

`pipelines/tracking/shipper.py` starts it.
"""

import sys
from functools import partial

from pipelines.base.background import run_in_background
from pipelines.base.repository import Repository
from pipelines.dvc_repo.repair import Watch
from pipelines.export.registry import register_last
from pipelines.ledger.cleanup import remove_stale_files
from pipelines.slurm.scheduler import Scheduler
from pipelines.tracking.rounds import Tracker
from pipelines.tracking.shipper import shipper_process


class Shipper(Tracker):
    """Ships a clone's ledger, and repairs what killed processes left in the clone."""

    def __init__(self, repository: Repository) -> None:
        super().__init__(repository, register_last)
        self._watch = Watch(repository)
        remove_stale_files(repository)

    def is_busy(self) -> bool:
        Scheduler(self.repository).refresh()
        self._watch.repair()
        return super().is_busy()


def run_shipper(repository: Repository, lock_timeout: float) -> None:
    shipper_process(repository).serve(partial(Shipper, repository), lock_timeout)


if __name__ == "__main__":
    run_in_background(run_shipper, sys.argv[1:])
