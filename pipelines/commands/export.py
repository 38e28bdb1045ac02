from pathlib import Path
from typing import Annotated, Literal

import typer

from pipelines.commands.options import Json, Revision, only_one, show


def export(
    policy: Annotated[str, typer.Argument(help="sft, iter_003, ...")],
    folder: Annotated[str, typer.Argument(help="where to write it; must not exist")],
    revision: Revision = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="round the weights to this type"),
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="the adapter next to its base")
    ] = False,
    merged: Annotated[
        bool, typer.Option("--merged", help="one model, adapter merged (default)")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="replace an existing folder")] = False,
    as_json: Json = False,
) -> None:
    """Write a policy as a Hugging Face folder with its card."""
    from pipelines.base.repository import Repository
    from pipelines.export.folder import export as write

    only_one(adapter=adapter, merged=merged)
    done = write(
        Repository.find(),
        policy,
        Path(folder),
        revision=revision,
        dtype=dtype,
        adapter=adapter,
        force=force,
    )
    text = f"{done.provenance.policy} {done.provenance.artifact.hash} is in {done.folder}"
    show(done.as_json(), text, as_json=as_json)
