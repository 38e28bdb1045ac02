"""The command `lockstep`: finds the file of a command, prints errors without tracebacks."""

import os
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from pipelines.base.console import say_anything
from pipelines.base.errors import LockstepError
from pipelines.base.owners import explain
from pipelines.base.repository import Repository
from pipelines.host.address import Host, chosen_host

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
HOST_OPTION = "--host"
ON_A_HOST = (
    *("plan", "run", "status", "cost", "logs", "cancel", "record", "shell", "top", "doctor"),
    *("samples", "scores", "lineage", "verify", "selftest", "ui", "up", "down"),
)
"""Commands that take --host."""
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
        command = get_command(found)
        if cmd_name in ON_A_HOST:
            command.params.append(_host_option())
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """One that is for a host is parsed here, so that errors are found early, and run there."""
        name, command, words = super().resolve_command(ctx, args)
        if name not in ON_A_HOST or command is None:
            return name, command, words
        option, words = _take_host(words)
        repository = _repository()
        if repository and (host := chosen_host(option, repository.root)):
            whole = list(words)  # parsing takes the words out of their list
            command.callback = lambda **_: _drive(host, name, whole)
        return name, command, words

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


def _take_host(words: list[str]) -> tuple[str | None, list[str]]:
    """The value of --host, and the other words."""
    ours = words[: words.index("--")] if "--" in words else words
    option, others = None, []
    rest = iter(ours)
    for word in rest:
        if word == HOST_OPTION:
            option = next(rest, "")
        elif word.startswith(f"{HOST_OPTION}="):
            option = word.partition("=")[2]
        else:
            others.append(word)
    if option == "":
        raise LockstepError(f"{HOST_OPTION} wants user@login:folder")
    return option, [*others, *words[len(ours) :]]


def _host_option() -> Any:
    """For the help; the option itself is taken from the command line before that is parsed."""

    def example(
        host: Annotated[
            str | None,
            typer.Option(
                HOST_OPTION,
                metavar="USER@LOGIN:FOLDER",
                help="in the clone there, over ssh (default: LOCKSTEP_HOST, else `git config "
                "lockstep.host`); `.`: here",
            ),
        ] = None,
    ) -> None: ...

    app = typer.Typer(add_completion=False, **PLAIN)
    app.command()(example)
    option = next(each for each in get_command(app).params if each.name == "host")
    option.expose_value = False
    return option


def _repository() -> Repository | None:
    """The clone around the current folder; without one, the command itself says so."""
    try:
        return Repository.find()
    except LockstepError:
        return None


def _drive(host: Host, name: str, words: list[str]) -> int:
    from pipelines.host.drive import drive

    return drive(host, name, words)
