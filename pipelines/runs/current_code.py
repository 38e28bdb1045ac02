"""The stages to run, after DVC's stage `code` is up to date.

`code` takes a second and needs no job, so it is brought up to date here, by one call of dvc, before
anything is started, restored or recorded; what runs stages sees the others alone.
"""

import os

from pipelines.base.repository import Repository
from pipelines.driver.dvc_process import dvc_path, run_dvc
from pipelines.dvc_repo.plan import PlannedStage, make_plan
from pipelines.identity.code import CODE_STAGE
from stages.contracts.params import Params


def plan_stages(
    repository: Repository, targets: list[str] | None, params: Params | None = None
) -> list[PlannedStage]:
    """The plan without `code`, which foresees what `code` writes and so stays true."""
    plan = make_plan(repository.root, targets, params)
    if any(stage.stale and stage.address == CODE_STAGE for stage in plan):
        update_code(repository)
    return [stage for stage in plan if stage.address != CODE_STAGE]


def update_code(repository: Repository) -> None:
    """Have DVC write the code maps anew."""
    environment = {**os.environ, "PATH": dvc_path()}
    failure = f"DVC could not bring `{CODE_STAGE}` up to date"
    run_dvc([CODE_STAGE], repository, environment, failure)
