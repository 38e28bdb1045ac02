import sys
from typing import Annotated

import typer

from pipelines.commands.options import Json, show


def verify(
    targets: Annotated[
        list[str] | None,
        typer.Argument(help="stages, or paths of outputs or in them (default: everything)"),
    ] = None,
    cache: Annotated[
        bool,
        typer.Option(
            "--cache",
            help="also read all of DVC's cache, also what dvc.lock does not name",
        ),
    ] = False,
    as_json: Json = False,
) -> int:
    """Hash every artifact again, and compare with dvc.lock."""
    from pipelines.base.console import Console
    from pipelines.base.repository import Repository
    from pipelines.results.verify import verify as read_again
    from pipelines.results.verify_report import Reading, render

    repository, console = Repository.find(), Console(sys.stderr)
    reading = Reading(console)
    try:
        outcome = read_again(repository, targets or [], whole_cache=cache, progress=reading.show)
    finally:
        console.clear()
    show(outcome.as_json(), render(outcome, repository.root), as_json=as_json)
    return 1 if outcome.findings else 0
