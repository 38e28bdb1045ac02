"""`lockstep session up`, `down` and `status`."""

from typing import Annotated

import typer

from pipelines.base.repository import Repository
from pipelines.commands.options import Json, Profile, show

session = typer.Typer(
    help="Keep one process, with its models in memory, for stage after stage.",
    subcommand_metavar="up|down|status",
    add_completion=False,
    rich_markup_mode=None,
)


@session.command()
def up(
    profile: Profile = None,
    name: Annotated[str, typer.Option(metavar="NAME", help="its name")] = "main",
    stages: Annotated[
        str, typer.Option(metavar="A,B", help="stages that it runs")
    ] = "rollout,score,policy_update",
    idle_minutes: Annotated[
        float, typer.Option(metavar="M", help="exit after M minutes without a stage")
    ] = 30,
    minutes: Annotated[
        int | None,
        typer.Option(metavar="M", help="exit after M minutes (default: the profile's)"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the exact job script instead")
    ] = False,
    as_json: Json = False,
) -> None:
    """Start a session."""
    from pipelines.runs import sessions

    repository = Repository.find()
    names = [each.strip() for each in stages.split(",") if each.strip()]
    launch = sessions.plan_launch(
        repository, name, profile, names, idle_minutes=idle_minutes, minutes=minutes
    )
    if dry_run:
        print(sessions.script(repository, name, launch))
        return
    started = sessions.up(repository, name, launch)
    text = (
        f"session {started.label} is on its way (log: {started.folder})\n"
        f"{', '.join(launch.stages)} of profile {launch.profile} go to it from now on"
    )
    show(started.as_json(), text, as_json=as_json)


@session.command()
def down(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="which (default: all)")
    ] = None,
) -> None:
    """End sessions."""
    from pipelines.base.console import Console
    from pipelines.runs import sessions

    sessions.down(Repository.find(), names or [], Console())


@session.command()
def status(as_json: Json = False) -> None:
    """Show the status of sessions."""
    from pipelines.slurm.scheduler import Scheduler
    from pipelines.worker.session import describe, sessions

    repository = Repository.find()
    Scheduler(repository).refresh()
    found = sessions(repository)
    text = "\n".join(map(describe, found)) or "no session was ever up; see `lockstep session up`"
    show([each.as_json() for each in found], text, as_json=as_json)
