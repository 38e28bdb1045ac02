from pathlib import Path
from typing import Annotated

import typer

from pipelines.commands.options import Json, from_zero, show


def compare(
    sides: Annotated[
        list[str],
        typer.Argument(
            metavar="A B [C...]",
            help="a policy (sft, iter_002), a commit, tag or DVC experiment for its last policy, "
            "REV:iter_002 for another of its policies, or `workspace`",
        ),
    ],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="write one page for a review")
    ] = None,
    limit: Annotated[
        int,
        typer.Option("-n", "--limit", metavar="N", help="samples to show of each pair; 0: all"),
    ] = 5,
    as_json: Json = False,
) -> None:
    """Compare policies: params, metrics, curves, wins, and the samples that changed sides."""
    import sys

    from pipelines.base import atomic
    from pipelines.base.errors import LockstepError
    from pipelines.base.repository import Repository
    from pipelines.results.compare import compare as gather
    from pipelines.results.compare_text import render

    from_zero(limit=limit)
    if html is not None and as_json:
        raise LockstepError("--json and --html are two forms: choose one")
    comparison = gather(Repository.find(), sides)
    if not as_json:
        for note in comparison.notes:
            print(f"lockstep: {note}", file=sys.stderr)
    if html is not None:
        from pipelines.results.compare_page import compare_page

        atomic.write_text(html, compare_page(comparison, limit or None))
        print(f"{html} compares {', '.join(side.name for side in comparison.sides)}")
        return
    text = "" if as_json else render(comparison, limit or None)
    show(comparison.as_json(limit or None) if as_json else None, text, as_json=as_json)
