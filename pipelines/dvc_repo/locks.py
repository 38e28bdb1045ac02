"""DVC's own locks of a clone, taken the way DVC takes them, and the settings that say how.

While `lock` is held no dvc of this clone writes dvc.lock or the cache; while `rwlock.lock` is held
none writes the list of busy paths. DVC lets go of both while a stage's command runs.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto
from pathlib import Path
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository

POLL_S = 0.2
SETTLE_S = 0.3
"""How long a file has to stay torn: such locks may not reach from one node to another."""


class Wait(Enum):
    """What to do while another dvc holds a lock."""

    NO = auto()
    """Go on without it: whoever comes next can do the work."""
    YES = auto()
    """Say so, and wait."""


@dataclass(frozen=True)
class Settings:
    """What DVC's configuration says."""

    hardlink_lock: bool
    """DVC can lock by hard links, for file systems without other locks."""
    cache: Path
    own_cache: bool
    """Whether the cache is the clone's: nobody has named a folder for it."""


def read_settings(root: Path) -> Settings:
    from dvc.config import Config
    from dvc.exceptions import DvcException

    try:
        config = Config(str(root / ".dvc"))
    except DvcException as error:
        raise LockstepError(f"{root}: DVC cannot read its settings: {error}") from None
    named = config["cache"].get("dir")
    return Settings(
        hardlink_lock=bool(config["core"].get("hardlink_lock", False)),
        cache=root / ".dvc" / (named or "cache"),
        own_cache=not named and "local" not in config["cache"],
    )


@contextmanager
def hold(
    repository: Repository, name: str, wait: Wait, say: Callable[[str], None]
) -> Iterator[bool]:
    """Hold one of DVC's locks; yields whether it could be had."""
    folder = repository.root / ".dvc/tmp"
    folder.mkdir(parents=True, exist_ok=True)
    hardlink = read_settings(repository.root).hardlink_lock
    path, announced = folder / name, False
    while (lock := _try(path, hardlink=hardlink)) is None:
        if wait is Wait.NO:
            yield False
            return
        if not announced:
            announced = True
            hint = "; if there is none, remove that file" if hardlink else ""
            say(f"waiting for another dvc command, which holds {path}{hint}")
        time.sleep(POLL_S)
    try:
        yield True
    finally:
        lock.unlock()


def _try(path: Path, *, hardlink: bool) -> Any | None:
    """One of DVC's locks, if it is free. DVC itself always tries for some seconds."""
    from dvc.lock import LockError, make_lock

    lock = make_lock(str(path), tmp_dir=str(path.parent), hardlink_lock=hardlink)
    try:
        if hardlink:
            lock.lock(timedelta(microseconds=1))
        else:
            lock._do_lock()
    except LockError:
        return None
    return lock
