"""The options of `lockstep lineage`. Imports little: every command's parser needs it."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipelines.base.errors import LockstepError


class Format(StrEnum):
    """The form of an answer."""

    TEXT = "text"
    JSON = "json"
    MERMAID = "mermaid"
    DOT = "dot"
    HTML = "html"


@dataclass(frozen=True)
class Question:
    """What the user typed."""

    words: Sequence[str]
    format: Format = Format.TEXT
    output: str | None = None
    down: bool = False
    depth: int | None = None
    rows: bool = False
    prompt: str | None = None
    limit: int | None = None
    all_params: bool = False
    ask_mlflow: bool = True


def add_options(command: argparse.ArgumentParser) -> None:
    """All but `--json`, which every command has."""
    command.usage = (
        "lockstep lineage [options] ARTIFACT\n       lockstep lineage [options] diff A B"
    )
    command.add_argument(
        "words",
        nargs="+",
        metavar="ARTIFACT",
        help="a path, a hash, an MLflow run, a stage, policy@iter_003 or prompt:ID, with REV: "
        "before it if not of the workspace; `diff A B` exits 0 if they are equal, 1 if not",
    )
    command.add_argument("--down", action="store_true", help="what was made from it instead")
    command.add_argument("--depth", type=int, metavar="N", help="no more than N steps away")
    command.add_argument(
        "--rows", action="store_true", help="the rows it learnt from; with diff, those that differ"
    )
    command.add_argument("--prompt", metavar="ID", help="only the rows of this prompt")
    command.add_argument(
        "--limit", type=int, default=20, metavar="N", help="rows to show (default: 20; 0: all)"
    )
    command.add_argument(
        "--params", action="store_true", help="all params, also those at their defaults"
    )
    command.add_argument(
        "--format",
        choices=("text", "mermaid", "dot", "html"),
        default="text",
        help="the form of the answer (default: text)",
    )
    command.add_argument("--output", metavar="FILE", help="write the answer there")
    command.add_argument(
        "--no-mlflow", action="store_true", help="ask no MLflow server for what is not known here"
    )


def question_of(arguments: argparse.Namespace) -> Question:
    """What was typed, as a question."""
    for name in ("depth", "limit"):
        if (getattr(arguments, name) or 0) < 0:
            raise LockstepError(f"--{name} is a number from 0 up, not {getattr(arguments, name)}")
    if arguments.json and arguments.format != Format.TEXT:
        raise LockstepError(f"--json and --format {arguments.format} are two forms: choose one")
    return Question(
        words=arguments.words,
        format=Format.JSON if arguments.json else Format(arguments.format),
        output=arguments.output,
        down=arguments.down,
        depth=arguments.depth,
        rows=arguments.rows,
        prompt=arguments.prompt,
        limit=arguments.limit or None,
        all_params=arguments.params,
        ask_mlflow=not arguments.no_mlflow,
    )
