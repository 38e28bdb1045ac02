"""DVC's own files after a kill.

DVC writes dvc.lock and its list of busy paths in place. A kill in that moment leaves half a file,
and every later dvc command refuses to work. So a copy of dvc.lock is kept while it is whole, and
the commands that start dvc first put right what they find torn and remove what was half-copied. A
stage that the copy does not have is not computed again: its outputs are in the ledger, or in DVC's
run cache.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from pipelines import atomic
from pipelines.errors import LockstepError
from pipelines.processes import lives
from pipelines.repository import Repository
from pipelines.strict_yaml import load_yaml


def keep_lock(repository: Repository) -> None:
    """Remember dvc.lock as it is now, if it is whole."""
    lock, kept = repository.root / "dvc.lock", _kept(repository)
    if not _is_whole(lock):
        return
    text = lock.read_text(encoding="utf-8")
    if not kept.is_file() or kept.read_text(encoding="utf-8") != text:
        atomic.write_text(kept, text)


def mend_dvc_files(repository: Repository, say: Callable[[str], None]) -> None:
    """Put right what a killed dvc left torn; waits for a living one to finish what it writes."""
    lock = repository.root / "dvc.lock"
    if _is_torn(lock):
        with _lock_of_dvc(repository, "lock"):
            if _is_torn(lock):
                _replace_lock(repository, lock, say)
    busy = repository.root / ".dvc/tmp/rwlock"
    if busy.exists():
        with _lock_of_dvc(repository, "rwlock.lock"):
            _free_paths(busy, say)
    clear_cache(repository)


def clear_cache(repository: Repository) -> None:
    """Remove what DVC left half done in its cache.

    A folder of the run cache without a run in it makes DVC fail whenever it comes to that stage.
    """
    if not _half_done(repository):
        return
    # While it is held, no other dvc of this clone writes to its cache.
    with _lock_of_dvc(repository, "lock"):
        for path in _half_done(repository):
            atomic.remove(path)


class Watch:
    """Mends what a killed dvc left torn as soon as it is seen, for a process that runs anyway.

    A plain `dvc repro` has nobody who looks before it does.
    """

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._seen: list[tuple[int, int] | None] = []

    def look(self) -> None:
        lock, busy = self._repository.root / "dvc.lock", self._repository.root / ".dvc/tmp/rwlock"
        clear_cache(self._repository)
        now = [_stamp(lock), _stamp(busy)]
        if now == self._seen:
            return
        if _is_torn(lock) or (now[1] and not _is_json(busy)):
            mend_dvc_files(self._repository, print)
        self._seen = now


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, FileNotFoundError):
        return not path.exists()
    return True


def _half_done(repository: Repository) -> list[Path]:
    """In the clone's own cache; one that clones share is left alone."""
    cache = repository.root / ".dvc/cache"
    copies = [*cache.glob("files/md5/.*.tmp"), *cache.glob("files/md5/*/.*.tmp")]
    runs = [run for run in cache.glob("runs/*/*") if not _has_a_run(run)]
    return [*copies, *runs, *cache.glob("runs/*/*/.*.tmp")]


def _has_a_run(folder: Path) -> bool:
    try:
        return any(not path.name.endswith(".tmp") for path in folder.iterdir())
    except OSError:
        return True  # gone meanwhile


def _replace_lock(repository: Repository, lock: Path, say: Callable[[str], None]) -> None:
    kept = _kept(repository)
    atomic.write_text(
        kept.with_name("dvc.lock.torn"), lock.read_text(encoding="utf-8", errors="replace")
    )
    if _is_whole(kept):
        say("dvc.lock is torn: dvc was killed while it wrote it; putting back what it was before")
        atomic.write_text(lock, kept.read_text(encoding="utf-8"))
    else:
        say("dvc.lock is torn: dvc was killed while it wrote it; DVC makes it anew")
        lock.unlink()


def _free_paths(busy: Path, say: Callable[[str], None]) -> None:
    """Drop the entries of processes that are gone, or were given the number of one that is."""
    try:
        listed = json.loads(busy.read_text(encoding="utf-8"))
    except ValueError:
        say("DVC's list of busy paths is torn: dvc was killed while it wrote it; removing it")
        busy.unlink(missing_ok=True)
        return
    except FileNotFoundError:
        return
    writes, reads = listed.get("write", {}), listed.get("read", {})
    readers = {path: [one for one in some if _is_dvc(one)] for path, some in reads.items()}
    kept = {
        **listed,
        "write": {path: one for path, one in writes.items() if _is_dvc(one)},
        "read": {path: some for path, some in readers.items() if some},
    }
    if kept != listed:
        atomic.write_text(busy, json.dumps(kept))


def _is_dvc(noted: dict[str, Any]) -> bool:
    try:
        process = psutil.Process(int(noted["pid"]))
        return lives(process) and "dvc" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _is_torn(lock: Path) -> bool:
    """Whether a kill may have made it unreadable; a conflict of git's is for people to resolve."""
    if not lock.exists() or _is_whole(lock):
        return False
    return "\n<<<<<<< " not in "\n" + lock.read_text(encoding="utf-8", errors="replace")


def _is_whole(lock: Path) -> bool:
    """Whether DVC could read it; an empty one it takes for a project where nothing has run.

    The first part of a file may well be YAML, with something left out at its end.
    """
    try:
        stages = load_yaml(lock, pure=False)["stages"]
        named = [item["path"] for stage in stages.values() for item in _files_of(stage)]
        return lock.read_text(encoding="utf-8").endswith("\n") and all(
            isinstance(path, str) for path in named
        )
    except (LockstepError, OSError, LookupError, AttributeError, TypeError):
        return False


def _files_of(stage: dict[str, Any]) -> list[dict[str, Any]]:
    return [*stage.get("deps", ()), *stage.get("outs", ())]


def _kept(repository: Repository) -> Path:
    return repository.home / "dvc.lock.whole"


def _lock_of_dvc(repository: Repository, name: str) -> Any:
    from dvc.lock import make_lock

    folder = repository.root / ".dvc/tmp"
    folder.mkdir(parents=True, exist_ok=True)
    return make_lock(str(folder / name), tmp_dir=str(folder), wait=True)
