"""`lockstep preset`."""

import json
from typing import Annotated

import typer

from pipelines.commands.options import Json


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
        listed = [each.as_json() for each in presets]
        print(json.dumps(listed, indent=2) if as_json else render_list(presets))
        return
    merged = merge(root, presets)
    if merged.changes and not dry_run:
        write(root, merged)
    if as_json:
        print(json.dumps([change.as_json() for change in merged.changes], indent=2))
    elif not merged.changes:
        print("nothing to change: params.yaml says it already")
    else:
        print(render_changes(merged.changes))
        if dry_run:
            print("params.yaml is as it was; without --dry-run these values are written")
        else:
            print("params.yaml is changed; `lockstep plan` says what would run")
