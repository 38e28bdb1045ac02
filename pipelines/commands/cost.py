import time
from typing import Annotated

import typer

from pipelines.commands.options import Json, show
from pipelines.runs.cost_by import By


def cost(
    by: Annotated[By, typer.Option("--by", help="what a line is about")] = By.STAGE,
    stage: Annotated[
        list[str] | None,
        typer.Option("--stage", metavar="STAGE", help="only of it: rollout, or rollout@iter_001"),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="WHEN", help="only from then on: 12h, 7d, 2w or a date"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Sum up what jobs took: GPU-hours computed and lost, CPU-hours, waiting, memory."""
    from pipelines.base.repository import Repository
    from pipelines.runs.cost import look, only, sum_up
    from pipelines.runs.cost_by import since_when
    from pipelines.runs.cost_table import render

    now = time.time()
    begin = since_when(since, now)
    items = look(Repository.find(), now)
    bill = sum_up(only(items, stage) if stage else items, by, begin, now)
    show(bill.as_json(), render(bill), as_json=as_json)
