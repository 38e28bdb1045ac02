"""Who owns a file or a job: in a shared clone, each user can change and cancel only their own."""

import os
import pwd
from pathlib import Path

from pipelines.base.errors import LockstepError


def user_name(uid: str | int) -> str:
    """The login of a user, or the number where it has none."""
    try:
        return pwd.getpwuid(int(uid)).pw_name
    except (KeyError, ValueError):
        return str(uid)


def not_ours(path: Path) -> LockstepError:
    """The error where another user's file would have to be changed."""
    return LockstepError(
        f"{path} belongs to {_owner(path)}, and you are {user_name(os.getuid())}: use a clone as "
        "one user only, or make your own with `git clone`"
    )


def explain(error: OSError) -> str:
    """The error's text; for a permission error, with the file's owner."""
    if not isinstance(error, PermissionError) or not isinstance(error.filename, str):
        return str(error)
    path = Path(error.filename)
    nearest = next(each for each in (path, *path.absolute().parents) if each.exists())
    return f"{error}; {nearest} belongs to {_owner(nearest)}, and you are {user_name(os.getuid())}"


def _owner(path: Path) -> str:
    return user_name(path.stat().st_uid)
