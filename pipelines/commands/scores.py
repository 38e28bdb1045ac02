from typing import Annotated

import typer

from pipelines.commands.options import Json, from_zero


def scores(
    one: Annotated[
        str, typer.Argument(metavar="A", help="iter_001, HEAD~1:iter_001, a path or a hash")
    ],
    other: Annotated[str, typer.Argument(metavar="B", help="another scoring of the same rollouts")],
    source: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="compare the values of this source, not the rewards; ONE,OTHER: a source of each",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", help="responses to show")] = 10,
    as_json: Json = False,
) -> int:
    """Say how far two scorings of the same rollouts agree, and where not."""
    from pipelines.results.scores import scores as compare

    from_zero(limit=limit)
    return compare(one, other, source, limit, as_json=as_json)
