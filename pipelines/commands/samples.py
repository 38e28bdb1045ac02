from typing import Annotated

import typer

from pipelines.commands.options import Json, only_one


def samples(
    policy: Annotated[
        str | None,
        typer.Argument(
            help="sft, iter_001, ...; of another commit, REV:iter_001 (default: the last)"
        ),
    ] = None,
    wrong: Annotated[bool, typer.Option("--wrong", help="only answers that are wrong")] = False,
    right: Annotated[bool, typer.Option("--right", help="only answers that are right")] = False,
    lost: Annotated[
        bool,
        typer.Option(
            "--lost",
            help="only where the other policy's reward is higher, the largest loss first",
        ),
    ] = False,
    won: Annotated[
        bool,
        typer.Option(
            "--won", help="only where the other policy's reward is lower, the largest gain first"
        ),
    ] = False,
    task: Annotated[str | None, typer.Option(metavar="T", help="only prompts of this task")] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="POLICY", help="the policy to compare with (default: sft)"),
    ] = None,
    sampled: Annotated[bool, typer.Option("--sampled", help="the sampled responses, too")] = False,
    limit: Annotated[
        int, typer.Option("-n", "--limit", metavar="N", help="maximum number of prompts; 0: all")
    ] = 10,
    as_json: Json = False,
) -> None:
    """Show a policy's answers to the held-out prompts."""
    from pipelines.base.repository import Repository
    from pipelines.results.samples import Query
    from pipelines.results.samples import samples as show

    which = only_one(wrong=wrong, right=right, lost=lost, won=won)
    query = Query(policy, which, task, against, sampled=sampled, limit=limit)
    print(show(Repository.find().root, query, as_json=as_json))
