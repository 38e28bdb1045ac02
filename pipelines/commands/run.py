from typing import Annotated

import typer

from pipelines.commands.options import DEFAULT_TARGETS, Profile, Targets, only_one


def run(
    targets: Targets = None,
    profile: Profile = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the exact job scripts instead of running")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="submit the stages that are ready, and return")
    ] = False,
    chain: Annotated[
        bool,
        typer.Option(
            "--chain",
            help="submit all stale stages to Slurm, each to start after those it needs, and return",
        ),
    ] = False,
) -> None:
    """Run the stale stages, in parallel where the graph allows it."""
    from pipelines.runs.run import run_pipeline

    only_one(dry_run=dry_run, detach=detach, chain=chain)
    run_pipeline(targets or DEFAULT_TARGETS, profile, dry_run=dry_run, detach=detach, chain=chain)
