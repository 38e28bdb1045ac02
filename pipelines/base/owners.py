"""Whose a file or a job is: in a clone that users share, each can end and change only their own."""

import os
import pwd
from pathlib import Path

from pipelines.base.errors import LockstepError


def user_name(uid: str | int) -> str:
    """The login of a user, or the number where nobody has it."""
    try:
        return pwd.getpwuid(int(uid)).pw_name
    except (KeyError, ValueError):
        return str(uid)


def not_ours(path: Path) -> LockstepError:
    """The error where somebody else's file would have to be changed."""
    return LockstepError(
        f"{path} belongs to {_owner(path)}, and you are {user_name(os.getuid())}: drive a clone as "
        "one user, or make a clone of your own with `git clone`"
    )


def explain(error: OSError) -> str:
    """The error in words; where something is not permitted, whose the file is."""
    if not isinstance(error, PermissionError) or not isinstance(error.filename, str):
        return str(error)
    path = Path(error.filename)
    there = next(found for found in (path, *path.absolute().parents) if found.exists())
    return f"{error}; {there} belongs to {_owner(there)}, and you are {user_name(os.getuid())}"


def _owner(path: Path) -> str:
    return user_name(path.stat().st_uid)
