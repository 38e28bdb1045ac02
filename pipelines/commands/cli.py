"""The command `lockstep`: finds the file of a command, prints errors without tracebacks."""

import os
import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from pipelines.base.console import say_anything
from pipelines.base.errors import LockstepError
from pipelines.base.owners import explain

GROUPS = {
    "Run the pipeline": (
        "plan",
        "run",
        "status",
        "cost",
        "logs",
        "cancel",
        "record",
        "stage",
        "code",
    ),
    "Slurm jobs by hand": ("shell", "top", "submit-script"),
    "Look at results": ("compare", "samples", "scores", "lm-eval", "lineage", "verify", "prune"),
    "Ask policies and people": ("chat", "annotate"),
    "Hand on a policy": ("export", "register"),
    "Choose and check settings": ("preset", "profile", "doctor", "selftest"),
    "Servers and kept processes": ("ui", "session", "up", "down", "sync"),
}
PLAIN: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    say_anything()
    app = typer.Typer(cls=_Commands, callback=_overview, **PLAIN)
    try:
        status = get_command(app).main(argv, prog_name="lockstep", standalone_mode=False)
    except typer.TyperException as error:
        error.show()  # type: ignore[attr-defined]
        status = error.exit_code
    return int(status or 0)


def _overview() -> None:
    """An RLHF pipeline as one versioned graph: SFT, reward model, rollouts, scores, policy updates.

    `lockstep COMMAND --help` has the options of a command.
    """


class _Commands(TyperGroup):
    """Imports the file of the command that is called, and no other."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = dict.fromkeys(name for names in GROUPS.values() for name in names)  # type: ignore[assignment]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        if cmd_name not in self.commands:
            return None
        name = cmd_name.replace("-", "_")
        found = getattr(import_module(f"pipelines.commands.{name}"), name)
        if not isinstance(found, typer.Typer):
            function, found = found, typer.Typer(add_completion=False, **PLAIN)
            found.command(cmd_name)(function)
        return get_command(found)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, names in GROUPS.items():
            with formatter.section(title):
                texts = (self.get_command(ctx, name).get_short_help_str(100) for name in names)
                formatter.write_dl(list(zip(names, texts, strict=True)), col_max=13)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except LockstepError as error:
            print(f"lockstep: {error}", file=sys.stderr)
            return 2
        except BrokenPipeError:
            # Whoever read has seen enough; nothing more must be written, not even at the end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except OSError as error:
            # A full or read-only disk, mostly: the message has the path, a traceback would hide it.
            print(f"lockstep: {explain(error)}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("lockstep: interrupted", file=sys.stderr)
            return 130
