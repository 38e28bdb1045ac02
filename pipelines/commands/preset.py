from typing import Annotated

import typer

from pipelines.commands.options import Json, show


def preset(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME", help="presets/NAME.yaml, later over earlier (default: list them)"
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="only print what would change")
    ] = False,
    as_json: Json = False,
) -> None:
    """List presets, or merge some into params.yaml."""
    from pipelines.base.repository import Repository
    from pipelines.config.presets import load_presets, merge, render_changes, render_list, write

    root = Repository.find().root
    presets = load_presets(root, names or [])
    if not names:
        show([each.as_json() for each in presets], render_list(presets), as_json=as_json)
        return
    merged = merge(root, presets)
    if merged.changes and not dry_run:
        write(root, merged)
    text = "nothing to change: params.yaml says it already"
    if merged.changes:
        text = render_changes(merged.changes) + (
            "\nparams.yaml is as it was; without --dry-run these values are written"
            if dry_run
            else "\nparams.yaml is changed; `lockstep plan` says what would run"
        )
    show([change.as_json() for change in merged.changes], text, as_json=as_json)
