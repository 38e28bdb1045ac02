"""`lockstep stage`: what dvc.yaml calls, so its start is part of what every stage costs."""

from typing import Annotated

import typer

from pipelines.commands.options import Profile


def stage(
    address: Annotated[str, typer.Argument(help="sft, rollout@iter_001, ...")],
    profile: Profile = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the exact job script instead")
    ] = False,
) -> None:
    """Run one stage (what dvc.yaml calls; use `dvc repro` yourself)."""
    from pipelines.driver.stage import render_stage, run_stage

    if dry_run:
        print(render_stage(address, profile))
    else:
        run_stage(address, profile)
