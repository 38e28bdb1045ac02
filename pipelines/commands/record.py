from typing import Annotated

import typer

from pipelines.commands.options import DEFAULT_TARGETS


def record(
    targets: Annotated[
        list[str] | None, typer.Argument(help="stages to record up to (default: report)")
    ] = None,
) -> None:
    """Have DVC record what jobs have finished unattended."""
    from pipelines.runs.record import record as record_all

    record_all(targets or DEFAULT_TARGETS)
