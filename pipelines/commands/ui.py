from typing import Annotated

import typer

from pipelines.base.errors import LockstepError


def ui(
    port: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, max=65535, help="port to serve at; 0: any free one"),
    ] = None,
    browse: Annotated[
        bool, typer.Option("--open/--no-open", help="open the pages in this machine's browser")
    ] = False,
) -> None:
    """Serve pages for a browser on loopback: the graph, live, and buttons to run and cancel."""
    from pipelines.base.console import Console
    from pipelines.base.repository import Repository

    repository = Repository.find()
    try:
        from pipelines.ui.serve import serve
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "uvicorn", "starlette"):
            raise
        raise LockstepError(
            f"the pages need {error.name}: pip install 'lockstep-rlhf[control]'"
        ) from None
    serve(repository, Console(), port, browse=browse)
