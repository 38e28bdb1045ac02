"""What is put in order around stages: what a kill left, and what params.yaml no longer names.

Whatever runs stages, one or many, calls these, and nothing else for the purpose.
"""

from collections.abc import Callable

from pipelines.base.repository import Repository
from pipelines.dvc_repo.lock_file import keep_lock
from pipelines.dvc_repo.lock_order import order_lock
from pipelines.dvc_repo.locks import Wait
from pipelines.dvc_repo.repair import repair_dvc_files
from pipelines.ledger.cleanup import remove_stale_files, remove_stale_outputs
from pipelines.ledger.entry import Ledger
from pipelines.ledger.publish import drop_recorded
from stages.contracts.params import Params

Say = Callable[[str], None]


def before_a_stage(repository: Repository, say: Say) -> None:
    """Does not wait for DVC's locks: the dvc that started the stage may hold them."""
    repair_dvc_files(repository, say, Wait.NO)
    keep_lock(repository)
    drop_recorded(repository.root, Ledger(repository.jobs))
    remove_stale_files(repository)


def before_a_run(repository: Repository, params: Params, say: Say) -> None:
    for path in remove_stale_outputs(repository, params):
        say(f"removed {path}: params.yaml no longer names it")
    repair_dvc_files(repository, say)
    remove_stale_files(repository)


def after_a_run(repository: Repository, say: Say) -> None:
    repair_dvc_files(repository, say)
    drop_recorded(repository.root, Ledger(repository.jobs))
    keep_lock(repository)
    order_lock(repository.root)
