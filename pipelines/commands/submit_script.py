from pathlib import Path
from typing import Annotated

import typer

from pipelines.commands.options import Profile


def submit_script(
    address: Annotated[str, typer.Argument(metavar="STAGE", help="sft, rollout@iter_001, ...")],
    profile: Profile = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="a file instead of the terminal")
    ] = None,
) -> None:
    """Write the job script of a stage, to submit it by hand."""
    from pipelines.base import atomic
    from pipelines.driver.stage import render_stage

    text = render_stage(address, profile)
    if output is None:
        print(text)
    else:
        atomic.write_text(output, text)
        print(output)
