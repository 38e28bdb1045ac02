from typing import Annotated

import typer

from pipelines.commands.options import Json, show


def status(
    orphans: Annotated[
        bool, typer.Option("--orphans", help="list live jobs that no stage needs instead")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the status of every stage, and queued experiments; works while stages run."""
    from pipelines.base.errors import LockstepError
    from pipelines.base.repository import Repository
    from pipelines.driver.orphans import find_orphans
    from pipelines.dvc_repo.queue import queued_experiments
    from pipelines.runs.status import render, render_queue, stage_statuses
    from pipelines.tracking.shipper import problem
    from pipelines.worker.session import describe, living

    repository = Repository.find()
    if orphans:
        found = find_orphans(repository)
        lines = [f"job {orphan.job}: {orphan.what}  {orphan.where}".rstrip() for orphan in found]
        lines += ["`lockstep cancel --orphans` ends them" if found else "no live job is unwanted"]
        show([orphan.as_json() for orphan in found], "\n".join(lines), as_json=as_json)
        return
    statuses = stage_statuses(repository)
    problems = list(filter(None, [problem(repository)]))
    try:
        queue = queued_experiments(repository.root)
    except LockstepError as error:
        queue, problems = [], [*problems, str(error)]
    lines = [render(statuses)]
    if not as_json:
        lines += [f"session {describe(session)}" for session in living(repository)]
        lines += [render_queue(queue)] if queue else []
        lines += problems
    value = {
        "stages": [each.as_json() for each in statuses],
        "experiments": [each.as_json() for each in queue],
        "problems": problems,
    }
    show(value, "\n".join(lines), as_json=as_json)
