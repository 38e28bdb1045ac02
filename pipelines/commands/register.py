from typing import Annotated

import typer

from pipelines.commands.options import Json, Revision, show


def register(
    policy: Annotated[str, typer.Argument(help="sft, iter_003, ...")],
    revision: Revision = None,
    name: Annotated[
        str | None, typer.Option(help="the registered model (default: the experiment's name)")
    ] = None,
    alias: Annotated[
        str | None, typer.Option(help="let this alias, such as champion, point to it")
    ] = None,
    as_json: Json = False,
) -> None:
    """Register a policy in MLflow's model registry."""
    from pipelines.base.repository import Repository
    from pipelines.export.registry import register as register_policy

    done = register_policy(Repository.find(), policy, revision=revision, name=name, alias=alias)
    show(done.as_json(), done.text, as_json=as_json)
