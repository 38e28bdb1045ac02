"""What killed processes left half done in DVC's cache.

Files that DVC was copying only take up room. A folder of the run cache without a run in it makes
DVC fail whenever it comes to that stage.

Whoever may still be at it keeps what is there. In the clone's own cache, with no experiment in a
folder of its own, only those write who hold DVC's lock: with it in hand, all of it can go. Anywhere
else only what has not changed for long goes.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pipelines.base import atomic
from pipelines.base.repository import Repository
from pipelines.dvc_repo.locks import Wait, hold, read_settings

COPY_AGE_S = 3600.0
RUN_AGE_S = 300.0
"""DVC makes the folder and the run in it within a moment."""


def clear_cache(repository: Repository, wait: Wait, say: Callable[[str], None]) -> None:
    """Remove what was left half done.

    Who has no time to wait looks at the usual place alone: to ask DVC for another takes a moment.
    """
    usual = repository.root / ".dvc/cache"
    if wait is Wait.NO and not _copies(usual) and not _empty_runs(usual):
        return
    settings = read_settings(repository.root)
    if not _copies(settings.cache) and not _empty_runs(settings.cache):
        return
    with hold(repository, "lock", wait, say) as held:
        alone = held and settings.own_cache and not _has_experiments(repository)
        copies, runs = _copies(settings.cache), _empty_runs(settings.cache)
        if not alone:
            copies = [path for path in copies if _age(path) > COPY_AGE_S]
            runs = [run for run in runs if _age(run) > RUN_AGE_S]
        for path in copies:
            with suppress(OSError):
                atomic.remove(path)
        for run in runs:
            with suppress(OSError):
                run.rmdir()  # not where somebody has put a run in it meanwhile


def _copies(cache: Path) -> list[Path]:
    places = ("files/md5/*.tmp", "files/md5/*/*.tmp", "runs/*/*/*.tmp")
    return [path for place in places for path in _found(cache, place)]


def _empty_runs(cache: Path) -> list[Path]:
    """Those with nothing in them, or nothing but copies."""
    return [run for run in _found(cache, "runs/*/*") if run.is_dir() and not _has_a_run(run)]


def _found(cache: Path, place: str) -> list[Path]:
    try:
        return list(cache.glob(place))
    except FileNotFoundError:
        return []  # somebody else clears it; what is left is seen the next time


def _has_a_run(folder: Path) -> bool:
    try:
        return any(path.suffix != ".tmp" for path in folder.iterdir())
    except OSError:
        return True  # gone meanwhile


def _has_experiments(repository: Repository) -> bool:
    """`dvc exp run --temp` and the queue work in such folders, with locks there and this cache."""
    place = repository.root / ".dvc/tmp/exps"
    return any([*place.glob("tmp*"), *place.glob("standalone/tmp*")])


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
