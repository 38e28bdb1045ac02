"""`lockstep record`: have DVC record what jobs have finished with nobody waiting for them.

Nothing is computed: a stage is handed to DVC only where the ledger has its outputs, or DVC's own
cache does.
"""

import shutil

from pipelines.base.console import Console
from pipelines.base.repository import Repository
from pipelines.config.chosen_profile import profile_name
from pipelines.config.params import load_params
from pipelines.driver.dvc_process import dvc_environment, run_dvc
from pipelines.driver.stage import fingerprint
from pipelines.driver.upkeep import after_a_run, before_a_run
from pipelines.dvc_repo.plan import PlannedStage
from pipelines.ledger.entry import Ledger
from pipelines.ledger.invocation import new_invocation
from pipelines.ledger.state import State
from pipelines.runs.current_code import plan_stages
from pipelines.runs.exclusive import PASSING, only_pipeline
from pipelines.slurm.link import RECORDER, links_of
from pipelines.slurm.scheduler import Scheduler


def record(targets: list[str], *, wait: bool = False) -> None:
    """Have DVC record what jobs have finished with nobody waiting for them.

    With `wait`, another pipeline of the clone is waited for; without, it is an error.
    """
    repository, console = Repository.find(), Console()
    with only_pipeline(repository, PASSING, console.line, wait=wait):
        plan = record_finished(repository, targets, profile_name(), console)
    left = sum(stage.stale for stage in plan)
    console.line(f"{len(plan) - left} of {len(plan)} stages are up to date")


def record_finished(
    repository: Repository, targets: list[str], profile: str, console: Console
) -> list[PlannedStage]:
    """Record every stage that only waits for that; the plan as it is afterwards."""
    params = load_params(repository.root)
    before_a_run(repository, params, console.line)
    Scheduler(repository).refresh(now=True)
    environment = dvc_environment(profile, new_invocation("lockstep record"))
    while True:
        plan = plan_stages(repository, targets, params)
        fresh = {stage.address for stage in plan if not stage.stale}
        finished = [
            stage
            for stage in plan
            if stage.cached
            or (
                stage.stale and fresh.issuperset(stage.upstream) and _is_finished(repository, stage)
            )
        ]
        if not finished:
            after_a_run(repository, console.line)
            _clear_chains(repository)
            return plan
        names = [stage.address for stage in finished]
        failure = f"DVC could not record {', '.join(names)}"
        run_dvc(names, repository, environment, failure)
        console.line(f"recorded: {', '.join(names)}")


def _clear_chains(repository: Repository) -> None:
    """Remove the workspaces of chains that are over; their links' logs and words are kept."""
    for chain in (repository.home / "chains").glob("*"):
        links = [link for its in links_of(chain).values() for link in its]
        if not any(link.attempt.state().alive for link in links if link.stage != RECORDER):
            shutil.rmtree(chain / "workspace", ignore_errors=True)


def _is_finished(repository: Repository, stage: PlannedStage) -> bool:
    """Whether the ledger has the outputs of exactly what the stage is now."""
    wanted = fingerprint(repository, stage.address)
    return any(
        entry.spec.fingerprint == wanted
        and entry.out.exists()
        and entry.state() in (State.COMPLETED, State.PUBLISHED)
        for entry in Ledger(repository.jobs).entries(stage.address)
    )
