"""Where the rows of each role come from, as params.yaml says it.

A *role* is what rows are for: to demonstrate, to compare, to be asked. A role has sources; each is
a glob of files under prepare.folder, or a dataset of a hub at one commit. Paths do not leave the
folder, because the folder is what DVC tracks; a hub's dataset is tracked by its commit instead.
"""

import re
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from stages.contracts.base import Section

_COMMIT = re.compile(r"[0-9a-f]{40}")


TOOLS_SUFFIX = ".tools.json"
"""Ends the name of a file with the tools that prompts offer."""


class Role(StrEnum):
    """What rows are for."""

    DEMONSTRATIONS = "demonstrations"
    PREFERENCES = "preferences"
    FEEDBACK = "feedback"
    STEPS = "steps"
    PROMPTS = "prompts"
    HELD_OUT = "held_out"
    HELD_OUT_PREFERENCES = "held_out_preferences"

    @property
    def is_held_out(self) -> bool:
        return self in (Role.HELD_OUT, Role.HELD_OUT_PREFERENCES)

    @property
    def asks(self) -> bool:
        """Whether its rows are prompts alone, each of them once."""
        return self in (Role.PROMPTS, Role.HELD_OUT)


class FormatName(StrEnum):
    """How a source writes its rows; docs/data.md has an example of each."""

    AUTO = "auto"
    TEXT = "text"
    MESSAGES = "messages"
    MESSAGES_RATED = "messages_rated"
    MESSAGES_PREFERENCE = "messages_preference"
    PROMPT = "prompt"
    PROMPT_COMPLETION = "prompt_completion"
    RATED = "rated"
    PREFERENCE = "preference"
    IMPLICIT_PREFERENCE = "implicit_preference"
    STEPWISE = "stepwise"
    RANKED = "ranked"
    ALPACA = "alpaca"
    ALPACA_PROMPT = "alpaca_prompt"
    ALPACA_RATED = "alpaca_rated"
    ALPACA_PREFERENCE = "alpaca_preference"
    SHAREGPT = "sharegpt"
    SHAREGPT_RATED = "sharegpt_rated"
    SHAREGPT_PREFERENCE = "sharegpt_preference"


class Source(Section):
    """Some rows of a role: files of the folder, or a split of a hub's dataset."""

    path: str = ""
    """A file or a glob under prepare.folder."""
    dataset: str = ""
    """In place of `path`: a dataset's id on the Hugging Face hub, `owner/name`."""
    revision: str = ""
    """The dataset's commit, 40 hexadecimal digits."""
    subset: str = ""
    """The dataset's configuration, where it has several."""
    split: str = "train"
    """The dataset's split."""
    format: FormatName = Field(default=FormatName.AUTO, strict=False)
    """How rows are written; `auto`: their columns tell."""
    columns: dict[str, str | None] = Field(default_factory=dict)
    """New names of columns, `{theirs: ours}`; null leaves a column out."""
    take: Literal["auto", "prompt", "chosen"] = "auto"
    """What a row gives: `chosen` makes a demonstration of a pair's better response."""
    weight: float = Field(default=1.0, gt=0)
    """How often each row is taken: 2 twice, 0.5 every other one, drawn by the seed."""

    @model_validator(mode="before")
    @classmethod
    def _a_bare_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_place(self) -> "Source":
        if bool(self.path) == bool(self.dataset):
            raise ValueError("give either `path` or `dataset`")
        if self.path and (
            PurePosixPath(self.path).is_absolute() or ".." in PurePosixPath(self.path).parts
        ):
            raise ValueError(
                f"path {self.path!r} leaves prepare.folder, which is what DVC tracks: put the "
                "files there, or set prepare.folder"
            )
        if self.dataset and not _COMMIT.fullmatch(self.revision):
            raise ValueError(
                f"dataset {self.dataset!r} needs a `revision`, the 40 digits of a commit: a branch "
                "moves, and the same params would mean other data"
            )
        if self.revision and not self.dataset:
            raise ValueError("`revision` is for a `dataset`: DVC tracks the files of a `path`")
        named = [name for name in self.columns.values() if name is not None]
        if len(named) != len(set(named)):
            raise ValueError("`columns` gives two columns the same name")
        return self

    @property
    def label(self) -> str:
        """What its rows are said to come from."""
        if self.path:
            return self.path
        subset = f"/{self.subset}" if self.subset else ""
        return f"{self.dataset}@{self.revision[:12]}{subset}:{self.split}"


def _listed(value: Any) -> Any:
    """One source needs no list around it."""
    return [value] if isinstance(value, str | dict) else value


Sources = dict[
    Annotated[Role, Field(strict=False)], Annotated[list[Source], BeforeValidator(_listed)]
]
"""The sources of each role."""
