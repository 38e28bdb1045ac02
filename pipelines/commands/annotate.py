"""`lockstep annotate queue`, `status` and `export`."""

from pathlib import Path
from typing import Annotated

import typer

from pipelines.base.repository import Repository
from pipelines.commands.options import Json, show

annotate = typer.Typer(
    help="Collect people's preferences: which pairs to ask about, who agrees, what to train on.",
    subcommand_metavar="queue|status|export",
    add_completion=False,
    rich_markup_mode=None,
)


@annotate.command()
def queue(
    iterations: Annotated[
        list[str] | None,
        typer.Argument(metavar="ITERATION", help="whose rollouts: iter_001, REV:iter_001, ..."),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="instead: two policies' answers to the held-out prompts"),
    ] = None,
    strategy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="random; close: rewards that differ least; disagreement: of two reward sources",
        ),
    ] = "random",
    limit: Annotated[
        int, typer.Option("-n", "--limit", metavar="N", help="number of pairs to draw")
    ] = 100,
    annotators: Annotated[
        int, typer.Option(metavar="N", help="how many people judge each pair")
    ] = 1,
    seed: Annotated[int, typer.Option(metavar="N", help="of the draw")] = 17,
    as_json: Json = False,
) -> None:
    """Add pairs of responses to the queue; the same command adds nothing twice."""
    from pipelines.annotations.filling import Wanted, fill, render

    pair = [name.strip() for name in policies.split(",")] if policies else []
    wanted = Wanted(tuple(iterations or ()), tuple(pair), strategy, limit, annotators, seed)
    filled = fill(Repository.find(), wanted)
    show(filled.as_json(), render(filled), as_json=as_json)


@annotate.command()
def status(as_json: Json = False) -> None:
    """Show how much is judged, by whom, and who agrees with whom."""
    from pipelines.annotations.status import annotation_status, render

    found = annotation_status(Repository.find().root)
    show(found.as_json(), render(found), as_json=as_json)


@annotate.command()
def export(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.jsonl", help="such as data/preferences.jsonl")
    ],
    held_out: Annotated[
        bool, typer.Option("--held-out", help="only pairs of held-out prompts, to measure with")
    ] = False,
    at_least: Annotated[
        int, typer.Option(metavar="N", help="only pairs that N people have judged")
    ] = 1,
    as_json: Json = False,
) -> None:
    """Write what most annotators prefer as a file of preferences that `prepare` reads."""
    from pipelines.annotations.export import export, render

    exported = export(Repository.find().root, file, held_out=held_out, at_least=at_least)
    show(exported.as_json(), render(exported), as_json=as_json)
