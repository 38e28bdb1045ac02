"""The records of the clone for the pages: read once, and again when one of them has changed.

Lineage is a join of dvc.lock, its history and the ledger. To read all of it takes a second or
more, to see whether it is still the same takes milliseconds.
"""

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from pipelines.base.git import git
from pipelines.base.repository import Repository
from pipelines.lineage.history import LOCK_FILE
from pipelines.lineage.run_index import RunIndex, gather

_OF_AN_ENTRY = ("spec.json", "record.json", "attempts")


class Records:
    """One reader at a time: questions add notes to the index, which are gone with them."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._lock = threading.Lock()
        self._known: tuple[Hashable, RunIndex] | None = None

    @contextmanager
    def read(self) -> Iterator[RunIndex]:
        """The index as of now."""
        with self._lock:
            state = _state(self._repository)
            if self._known is None or self._known[0] != state:
                self._known = (state, gather(self._repository))
            run_index = self._known[1]
            notes = list(run_index.notes)
            try:
                yield run_index
            finally:
                run_index.notes[:] = notes


@cache
def records_of(repository: Repository) -> Records:
    """The records of a clone: all pages read the same."""
    return Records(repository)


def _state(repository: Repository) -> Hashable:
    """What changes whenever a record does."""
    refs = git(repository.root, "for-each-ref", "--format=%(objectname)")
    head = git(repository.root, "rev-parse", "--quiet", "--verify", "HEAD")
    entries = repository.jobs.glob("*/[!.]*")
    jobs = [_signature(folder / name) for folder in sorted(entries) for name in _OF_AN_ENTRY]
    return (_signature(repository.root / LOCK_FILE), refs, head, *jobs)


def _signature(path: Path) -> tuple[str, int, int] | None:
    with suppress(OSError):
        state = path.stat()
        return str(path), state.st_mtime_ns, state.st_size
    return None
