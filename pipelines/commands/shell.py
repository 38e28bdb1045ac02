from typing import Annotated

import typer


def shell(
    stage: Annotated[str, typer.Argument(help="sft, rollout@iter_001, ...")],
    command: Annotated[
        list[str] | None, typer.Argument(help="a command instead of a shell, after --")
    ] = None,
    job: Annotated[str | None, typer.Option(help="of an array, this task: 3, or 1234_3")] = None,
    node: Annotated[str | None, typer.Option(help="of a job on several nodes, this one")] = None,
    outside: Annotated[
        bool, typer.Option("--outside", help="without the profile's setup and container")
    ] = False,
) -> None:
    """Open a shell, or run a command, inside a stage's running Slurm job."""
    from pipelines.base.repository import Repository
    from pipelines.slurm.inside import run_inside, the_job_of

    running = the_job_of(Repository.find(), stage, job)
    raise typer.Exit(run_inside(running, command or [], node, outside=outside))
