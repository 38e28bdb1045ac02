from typing import Annotated

import typer

from pipelines.commands.options import DEFAULT_TARGETS


def record(
    targets: Annotated[
        list[str] | None, typer.Argument(help="stages to record up to (default: report)")
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="wait while another pipeline runs in this clone")
    ] = False,
) -> None:
    """Have DVC record what jobs have finished unattended."""
    from pipelines.runs.record import record as record_all

    record_all(targets or DEFAULT_TARGETS, wait=wait)
