"""The clone that a server shows, and the token without which nobody changes anything in it.

The token is one line in a file that only its owner can read. It is kept, so that a server that was
started again serves the pages that are still open.
"""

from dataclasses import dataclass, field
from pathlib import Path

from pipelines.base.private import kept_secret
from pipelines.base.repository import Repository


@dataclass(frozen=True)
class Clone:
    """What every page is given."""

    root: Path
    token: str = field(repr=False)

    @property
    def repository(self) -> Repository:
        return Repository(self.root)


def open_clone(repository: Repository) -> Clone:
    """The clone with its token, which is made on first use."""
    return Clone(repository.root, token_of(repository))


def token_file(repository: Repository) -> Path:
    return repository.home / "ui.token"


def token_of(repository: Repository) -> str:
    return kept_secret(token_file(repository))
