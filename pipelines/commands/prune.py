from typing import Annotated

import typer

from pipelines.commands.options import Json, from_zero, show


def prune(
    everything: Annotated[
        bool, typer.Option("--all", help="also where no later iteration has used them")
    ] = False,
    keep_last: Annotated[
        int, typer.Option("--keep-last", metavar="N", help="keep the last N of them")
    ] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would go")] = False,
    as_json: Json = False,
) -> None:
    """Remove the training states that later iterations have used, and keep the policies."""
    from pipelines.base.repository import Repository
    from pipelines.results.verify_report import size
    from pipelines.runs.prune import prune_states

    from_zero(keep_last=keep_last)
    states = prune_states(
        Repository.find(), unused=everything, keep_last=keep_last, dry_run=dry_run
    )
    lines = [f"{state.path}  {size(state.num_bytes)}  ({state.stage})" for state in states]
    total = size(sum(state.num_bytes for state in states))
    what = "would be removed" if dry_run else "removed"
    count = f"{len(states)} state{'s' if len(states) > 1 else ''}"
    lines.append(f"{count} {what}, {total}" if states else "nothing to prune")
    show([state.as_json() for state in states], "\n".join(lines), as_json=as_json)
