"""File locks that are released when the process that holds them ends, however it ends."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipelines.base.errors import LockstepError


@contextmanager
def hold_lock(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold the lock while the block runs; yields whether it is held."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            raise LockstepError(
                f"{path}: this file system supports no locks ({error.strerror}), which DVC needs "
                "too; mount it with locks (Lustre: -o flock), or move the clone"
            ) from None
        yield True


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock."""
    try:
        with path.open("r", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
