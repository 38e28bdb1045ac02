"""`lockstep status`."""

import json
from typing import Annotated

import typer

from pipelines.commands.options import Json


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
        if as_json:
            print(json.dumps([orphan.as_json() for orphan in found], indent=2))
            return
        for orphan in found:
            print(f"job {orphan.job}: {orphan.what}  {orphan.where}".rstrip())
        print("`lockstep cancel --orphans` ends them" if found else "no live job is unwanted")
        return
    statuses = stage_statuses(repository)
    if as_json:
        print(json.dumps([each.as_json() for each in statuses], indent=2))
        return
    print(render(statuses))
    for session in living(repository):
        print(f"session {describe(session)}")
    trouble = problem(repository)
    if trouble:
        print(trouble)
