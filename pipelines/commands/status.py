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
    from pipelines.runs.status import render, render_queue, stage_statuses, with_costs
    from pipelines.servers.running import running
    from pipelines.tracking.shipper import problem
    from pipelines.worker.session import describe, living

    repository = Repository.find()
    if orphans:
        found = find_orphans(repository)
        lines = [f"job {orphan.job}: {orphan.what}  {orphan.where}".rstrip() for orphan in found]
        lines += ["`lockstep cancel --orphans` ends them" if found else "no live job is unwanted"]
        show([orphan.as_json() for orphan in found], "\n".join(lines), as_json=as_json)
        return
    statuses = with_costs(stage_statuses(repository), only_gpus=not as_json)
    problems = list(filter(None, [problem(repository)]))
    try:
        queue = queued_experiments(repository.root)
    except LockstepError as error:
        queue, problems = [], [*problems, str(error)]
    servers = {name: each for name, each in running(repository).items() if name != "worker"}
    lines = [render(statuses)]
    if not as_json:
        lines += [f"session {describe(session)}" for session in living(repository)]
        lines += [render_queue(queue)] if queue else []
        lines += problems
        lines += [_server_line(server.name, server.url) for server in servers.values()]
    value = {
        "stages": [each.as_json() for each in statuses],
        "experiments": [each.as_json() for each in queue],
        "problems": problems,
        "servers": {name: server.url for name, server in servers.items()},
    }
    show(value, "\n".join(lines), as_json=as_json)


def _server_line(name: str, url: str) -> str:
    how = "   (`lockstep ui` prints the link that opens it)" if name == "ui" else ""
    return f"server {name}: {url}{how}"
