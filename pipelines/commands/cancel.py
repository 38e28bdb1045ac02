from typing import Annotated

import typer

from pipelines.base.errors import LockstepError


def cancel(
    stages: Annotated[
        list[str] | None, typer.Argument(help="stages whose jobs to cancel (default: all)")
    ] = None,
    orphans: Annotated[
        bool, typer.Option("--orphans", help="cancel the live jobs that no stage needs instead")
    ] = False,
) -> None:
    """End live jobs, and those of the stages that need theirs."""
    from pipelines.base.console import Console
    from pipelines.base.repository import Repository
    from pipelines.runs.cancel import cancel_orphans, cancel_stages

    if not orphans:
        cancel_stages(Repository.find(), stages or [], Console())
    elif stages:
        raise LockstepError("name stages, or pass --orphans, not both")
    else:
        cancel_orphans(Repository.find(), Console())
