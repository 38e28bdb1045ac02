"""What several commands share: options, checks of them, and the choice between JSON and text."""

import json
from typing import Annotated, Any

import typer

from pipelines.base.errors import LockstepError

Json = Annotated[bool, typer.Option("--json", help="print JSON")]
Profile = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="slurm_profiles/NAME.yaml: where and with which resources stages run "
        "(default: LOCKSTEP_PROFILE, else local)",
    ),
]
Targets = Annotated[
    list[str] | None, typer.Argument(help="stages to bring up to date (default: report)")
]
Revision = Annotated[
    str | None, typer.Option("--rev", metavar="REV", help="of this commit, tag or DVC experiment")
]
DEFAULT_TARGETS = ["report"]


def show(value: Any, text: str, *, as_json: bool) -> None:
    print(json.dumps(value, indent=2) if as_json else text)


def only_one(**flags: bool) -> str | None:
    """The name of the flag that was given, if any."""
    given = [name for name, is_given in flags.items() if is_given]
    if len(given) > 1:
        options = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise LockstepError(f"{options} are not for one command: choose one")
    return given[0] if given else None


def from_zero(**numbers: int | None) -> None:
    """Refuse what is below 0."""
    for name, number in numbers.items():
        if (number or 0) < 0:
            raise LockstepError(f"--{name} is a number from 0 up, not {number}")
