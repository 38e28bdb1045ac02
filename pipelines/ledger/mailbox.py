"""Where the driver of a stage leaves an attempt for a session, and the session takes it.

A post is a small file named after its attempt. It is in one place at a time and moves by renaming:
`mailbox/` while it waits, `taken/` once the session has it. So a driver that takes its post back
and a session that takes it on cannot both succeed, and after any death it is known who had it.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pipelines.ledger import files


@dataclass(frozen=True)
class Post:
    """An attempt that a session shall run, with that copy of the code."""

    VERSION: ClassVar[int] = 1

    attempt: Path
    code: Path
    time: float


def post(session: Path, attempt: Path, code: Path) -> None:
    """Ask the session in this folder to run an attempt with that copy of the code."""
    files.write(_waiting(session, attempt), Post(attempt, code, time.time()))


def withdraw(session: Path, attempt: Path) -> bool:
    """Take a post back; False where the session has taken it, or nobody ever posted it."""
    try:
        _waiting(session, attempt).unlink()
    except FileNotFoundError:
        return False
    return True


def is_waiting(session: Path, attempt: Path) -> bool:
    return _waiting(session, attempt).exists()


def is_taken(session: Path, attempt: Path) -> bool:
    return _taken(session, attempt).exists()


def waiting(session: Path) -> list[Post]:
    """The posts that wait, the oldest first."""
    posts = [files.read(Post, path) for path in (session / "mailbox").glob("[!.]*.json")]
    return sorted((each for each in posts if each), key=lambda each: each.time)


def take(session: Path, attempt: Path) -> bool:
    """Take a post on; False where it was withdrawn."""
    target = _taken(session, attempt)
    target.parent.mkdir(exist_ok=True)
    try:
        _waiting(session, attempt).rename(target)
    except FileNotFoundError:
        return False
    return True


def _waiting(session: Path, attempt: Path) -> Path:
    return session / "mailbox" / _name(attempt)


def _taken(session: Path, attempt: Path) -> Path:
    return session / "taken" / _name(attempt)


def _name(attempt: Path) -> str:
    entry = attempt.parent.parent
    return f"{entry.parent.name}.{entry.name}.{attempt.name}.json"
