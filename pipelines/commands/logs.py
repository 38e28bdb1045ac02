import sys
from typing import Annotated

import typer


def logs(
    stage: Annotated[str, typer.Argument(help="sft, rollout@iter_001, ...")],
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="follow until the job has ended")
    ] = False,
) -> None:
    """Show what a stage's job wrote."""
    from pipelines.base.repository import Repository
    from pipelines.slurm.logs import show_logs

    show_logs(Repository.find(), stage, sys.stdout.write, follow=follow)
