from typing import Annotated

import typer

from pipelines.commands.options import Json, show


def status(
    orphans: Annotated[
        bool, typer.Option("--orphans", help="list live jobs that no stage needs instead")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the status of every stage; works while stages run."""
    from pipelines.base.repository import Repository
    from pipelines.driver.orphans import find_orphans
    from pipelines.runs.status import render, stage_statuses
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
    lines = [render(statuses)]
    if not as_json:
        lines += [f"session {describe(session)}" for session in living(repository)]
        lines += filter(None, [problem(repository)])
    show([each.as_json() for each in statuses], "\n".join(lines), as_json=as_json)
