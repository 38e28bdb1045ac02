"""`python -m pipelines`: the command `lockstep`, with the code of the clone it is called in.

dvc.yaml uses this form, so that a stage runs the very files that DVC hashes, whichever clone the
environment was installed from.
"""

import sys

try:
    if sys.argv[1:2] == ["stage"] and len(sys.argv) == 3:  # as in dvc.yaml, without options
        from pipelines.warm.stage import run_forked

        if (status := run_forked(sys.argv[1:])) is not None:
            sys.exit(status)
    from pipelines.commands.cli import main

    sys.exit(main())
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] in ("pipelines", "stages"):
        raise
    sys.exit(
        f"lockstep: this Python ({sys.executable}) has no {error.name!r}; activate the project's "
        "environment first (source .venv/bin/activate), or make it with `make venv`"
    )
