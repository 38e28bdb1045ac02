import json
import sys
import time
from typing import Annotated

import typer


def top(
    once: Annotated[bool, typer.Option("--once", help="print once, then end")] = False,
    seconds: Annotated[float, typer.Option("-n", "--seconds", min=1, help="between two looks")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON, once")] = False,
) -> None:
    """Show what running Slurm jobs use: GPUs, memory, cores."""
    from pipelines.base.repository import Repository
    from pipelines.runs.top import look, table

    repository = Repository.find()
    while True:
        seen = look(repository)
        if as_json:
            print(json.dumps(seen, indent=2))
            return
        if sys.stdout.isatty() and not once:
            print("\x1b[2J\x1b[H", end="")  # an empty screen
        print(table(seen), flush=True)
        if once or not sys.stdout.isatty():
            return
        time.sleep(seconds)
