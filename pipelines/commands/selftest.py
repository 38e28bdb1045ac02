from pathlib import Path
from typing import Annotated

import typer

from pipelines.base.repository import Repository
from pipelines.commands.options import Json, Profile, show


def selftest(
    profile: Profile = None,
    nodes: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="nodes (default: the profile's)")
    ] = None,
    tasks_per_node: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="ranks on each node, and so GPUs where the profile computes on them "
            "(default: the profile's)",
        ),
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option(
            metavar="STAGE",
            help="whose resources the job takes (default: the training stage with the most ranks)",
        ),
    ] = None,
    minutes: Annotated[
        int, typer.Option(metavar="M", min=1, help="time limit of the job, in minutes")
    ] = 20,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="write report.txt and report.json here, too"),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="keep the models and checkpoints of the checks")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the exact job script instead")
    ] = False,
    as_json: Json = False,
) -> int:
    """Prove a cluster in minutes: GPUs, network, disk, training, sampling, kill and resume."""
    import sys

    from pipelines.base.console import Console
    from pipelines.config.chosen_profile import profile_name
    from pipelines.selftest import job

    repository = Repository.find()
    launch, chosen = job.plan_launch(
        repository,
        profile_name(profile),
        stage=stage,
        nodes=nodes,
        tasks_per_node=tasks_per_node,
        minutes=minutes,
    )
    if dry_run:
        print(job.script(repository, launch))
        return 0
    # What is printed is the report alone; how far it is goes to the other stream.
    report = job.run_selftest(repository, launch, chosen, Console(sys.stderr), keep=keep)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        report.write(output)
    show(report.as_json(), report.page(), as_json=as_json)
    return report.exit_status
