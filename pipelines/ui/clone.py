"""The clone that a server shows, and the token without which nobody changes anything in it.

The token is one line in a file that only its owner can read. It is kept, so that a server that was
started again serves the pages that are still open.
"""

import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from pipelines.base import atomic
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
    path = token_file(repository)
    token = path.read_text(encoding="utf-8").strip() if path.exists() else ""
    if not token:
        token = secrets.token_hex(16)
        write_private(path, f"{token}\n")
    path.chmod(0o600)
    return token


def write_private(path: Path, text: str) -> None:
    """A file that only its owner can read, from its first byte on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = atomic.unique(path)
    aside.touch(0o600)
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)
