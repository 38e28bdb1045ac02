from typing import Annotated, Literal

import typer

from pipelines.base.errors import LockstepError
from pipelines.commands.options import Json, from_zero


def lineage(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="ARTIFACT | diff A B",
            help="a path, a hash, an MLflow run, a stage, policy@iter_003 or prompt:ID, with REV: "
            "before it if not of the workspace; `diff A B` exits 0 if they are equal, 1 if not",
        ),
    ],
    down: Annotated[bool, typer.Option("--down", help="show downstream artifacts instead")] = False,
    depth: Annotated[
        int | None, typer.Option(metavar="N", help="no more than N steps away")
    ] = None,
    rows: Annotated[
        bool, typer.Option("--rows", help="its training rows; with diff, those that differ")
    ] = False,
    prompt: Annotated[
        str | None, typer.Option(metavar="ID", help="only the rows of this prompt")
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", help="rows to show; 0: all")] = 20,
    all_params: Annotated[
        bool, typer.Option("--params", help="all params, also those at their defaults")
    ] = False,
    form: Annotated[
        Literal["text", "mermaid", "dot", "html"],
        typer.Option("--format", help="output format"),
    ] = "text",
    output: Annotated[
        str | None, typer.Option(metavar="FILE", help="write the answer there")
    ] = None,
    no_mlflow: Annotated[
        bool, typer.Option("--no-mlflow", help="do not query MLflow for what is not known here")
    ] = False,
    as_json: Json = False,
) -> int:
    """Say what made an artifact, what was made from it, or why two differ."""
    from pipelines.lineage.answer import Question, answer

    from_zero(depth=depth, limit=limit)
    if as_json and form != "text":
        raise LockstepError(f"--json and --format {form} are two forms: choose one")
    return answer(
        Question(
            words=words,
            format="json" if as_json else form,
            output=output,
            down=down,
            depth=depth,
            rows=rows,
            prompt=prompt,
            limit=limit or None,
            all_params=all_params,
            ask_mlflow=not no_mlflow,
        )
    )
