"""DVC's own files after a kill.

DVC writes dvc.lock and its list of busy paths in place. A kill in that moment leaves half a file,
and every later dvc command refuses to work. So a copy of dvc.lock is kept while it is whole, and
the commands that start dvc first put right what they find torn and remove what was half-copied. A
stage that the copy does not have is not computed again: its outputs are in the ledger, or in DVC's
run cache.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.dvc_repo.cache_repair import clear_cache
from pipelines.dvc_repo.lock_file import is_torn, restore_lock
from pipelines.dvc_repo.locks import SETTLE_S, Wait, hold
from pipelines.dvc_repo.rwlock_repair import busy_file, free_paths, is_list_torn

CACHE_INTERVAL_S = 60.0


def repair_dvc_files(
    repository: Repository, say: Callable[[str], None], wait: Wait = Wait.YES
) -> None:
    """Put right what a killed dvc left torn, not what a living one is writing just now."""
    if is_torn(repository):
        time.sleep(SETTLE_S)
        with hold(repository, "lock", wait, say) as held:
            if held and is_torn(repository):
                restore_lock(repository, say)
    free_paths(repository, wait, say)
    clear_cache(repository, wait, say)


class Watch:
    """Repairs what a killed dvc left torn soon after, for a process that runs anyway.

    A plain `dvc repro` has nobody who looks before it does. A file is torn when it is at two checks
    in a row, with nothing written in between.
    """

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._seen: list[tuple[int, int] | None] = []
        self._fine: list[tuple[int, int] | None] = []
        self._cleared = -CACHE_INTERVAL_S

    def repair(self) -> None:
        with suppress(LockstepError):  # settings that DVC cannot read, as DVC says itself
            self._repair()

    def _repair(self) -> None:
        if time.monotonic() - self._cleared >= CACHE_INTERVAL_S:
            self._cleared = time.monotonic()
            clear_cache(self._repository, Wait.NO, print)
        before = self._seen
        self._seen = [
            _stamp(path)
            for path in (self._repository.root / "dvc.lock", busy_file(self._repository))
        ]
        if self._seen != before or self._seen == self._fine:
            return
        if is_torn(self._repository) or is_list_torn(self._repository):
            repair_dvc_files(self._repository, print, Wait.NO)
        else:
            self._fine = self._seen


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size
