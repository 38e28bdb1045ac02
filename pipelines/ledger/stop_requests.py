"""What a command wants done with its running stages: a file that their drivers look at.

A signal can come before its receiver listens, and dvc stands between the command and the drivers.
A file waits until it is read.
"""

from enum import StrEnum
from pathlib import Path

from pipelines.base import atomic
from pipelines.base.repository import Repository


class Wish(StrEnum):
    """How the jobs of an invocation shall end for it."""

    CANCEL = "cancel"
    DETACH = "detach"
    """The drivers let go and the jobs go on."""


def make_wish(repository: Repository, invocation: str, wish: Wish) -> None:
    atomic.write_json(_path(repository, invocation), {"wish": wish})


def wish_of(repository: Repository, invocation: str) -> Wish | None:
    """What the command behind this invocation wants, if it wants anything but the results."""
    found = atomic.read_json(_path(repository, invocation))
    return Wish(found["wish"]) if found else None


def _path(repository: Repository, invocation: str) -> Path:
    return repository.home / "runs" / invocation / "wish.json"
