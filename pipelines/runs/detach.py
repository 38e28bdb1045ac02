"""`lockstep run --detach`: submit what can start now, and leave."""

from pipelines.base.console import Console
from pipelines.base.repository import Repository
from pipelines.driver.stage import make_driver
from pipelines.dvc_repo.plan import PlannedStage
from pipelines.slurm.link import waiting_links


def submit_ready(
    repository: Repository, profile: str, plan: list[PlannedStage], console: Console
) -> None:
    """Submit the stages that wait for nothing; the others would have nothing to read."""
    fresh = {stage.address for stage in plan if not stage.stale}
    stale = [stage for stage in plan if stage.stale]
    ready = [stage for stage in stale if fresh.issuperset(stage.upstream)]
    waiting = waiting_links(repository)
    for stage in ready:
        if stage.address in waiting:
            console.line(f"{stage.address}: a chain has its job in the queue already")
            continue
        make_driver(repository, stage.address, profile, console).submit_only()
    if len(ready) < len(stale):
        console.line(
            f"{len(stale) - len(ready)} more stages need what these make: run the same command "
            "when they are done, or use --chain to have all of them wait in the queue"
        )
