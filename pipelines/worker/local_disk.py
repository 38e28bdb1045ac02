"""A node's own disk, as a cache that the jobs of one user share: entries by name.

Always true:
- An entry is whole or not there: it is made aside, synced and renamed. What a killed process has
  left aside is never read, and is removed by the next one that needs room.
- One process of a node makes an entry; the others wait for it. They know of each other by locks of
  the system, which end with the process that holds them.
- An entry that a living process holds is not removed. Of the others the least recently used goes
  first, when there is no room for another within the size that the profile allows.
- Nobody else may read it: the folder is the user's own, and one that is not is not used.
"""

import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pipelines.base import atomic
from pipelines.config.profiles import bytes_of
from pipelines.config.stage_in import StageIn

POLL_S = 0.2
_SIZE = ".size"
"""A file of each entry: the bytes it was given room for, last touched when it was last used."""


class NoRoom(OSError):
    """The disk cannot be used, or has no room for one more entry."""


@dataclass
class Held:
    """An entry that stays as long as this is not closed, by this process at the latest."""

    path: Path
    _lock: int

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


@dataclass(frozen=True)
class LocalDisk:
    """The user's folder on it."""

    folder: Path
    size: int
    """The bytes that all entries may have together."""

    def use(
        self,
        name: str,
        size: int,
        fill: Callable[[Path], None],
        waiting: Callable[[int], None] = lambda _: None,
    ) -> Held:
        """The entry, which `fill` makes in an empty folder where it is not there.

        `waiting` is called while another process makes it, with the bytes there so far, and may
        raise, as `fill` may. OSError where the disk does not work; NoRoom where it is too small.
        """
        while True:
            if held := self.hold(name):
                return held
            lock = self._lock(name, fcntl.LOCK_EX)
            if lock is None:
                waiting(_bytes(self._aside(name)))
                time.sleep(POLL_S)
                continue
            try:
                # Programs that clean disks remove single files: what has lost its own is remade.
                if not (self._path(name) / _SIZE).is_file():
                    self._make(name, size, fill)
            except BaseException:
                self._lock_file(name).unlink(missing_ok=True)
                raise
            finally:
                os.close(lock)

    def hold(self, name: str) -> Held | None:
        """The entry if it is there, and nobody is making or removing it."""
        lock = self._lock(name, fcntl.LOCK_SH)
        if lock is None:
            return None
        path = self._path(name)
        try:
            os.utime(path / _SIZE)
            os.utime(lock)  # old files are what such programs remove; a lock must stay
        except FileNotFoundError:
            os.close(lock)
            return None
        return Held(path, lock)

    def remove(self, name: str) -> bool:
        """Remove an entry that nobody holds; says whether it is gone."""
        lock = self._lock(name, fcntl.LOCK_EX)
        if lock is None:
            return False
        try:
            aside = self._aside(name)
            atomic.remove(aside)
            with suppress(FileNotFoundError):
                # Half an entry must not have its name.
                self._path(name).rename(aside)
            atomic.remove(aside)
            self._lock_file(name).unlink(missing_ok=True)
        finally:
            os.close(lock)
        return True

    def make_room(self, size: int) -> None:
        """For bytes that the holder of an entry adds to it; NoRoom where that cannot be."""
        with self._alone():
            self._make_room(size)

    def _make(self, name: str, size: int, fill: Callable[[Path], None]) -> None:
        """Its lock is held alone."""
        aside = self._aside(name)
        try:
            with self._alone():
                for left in (aside, self._path(name)):
                    atomic.remove(left)
                self._make_room(size)
                aside.mkdir(mode=0o700)
                (aside / _SIZE).write_text(str(size))
            fill(aside)
            for each in (aside, *(path for path in aside.rglob("*") if path.is_dir())):
                _sync(each)
            aside.rename(self._path(name))
            _sync(self.folder)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise

    def _make_room(self, size: int) -> None:
        """Remove what must go for so many bytes more; NoRoom where that is not enough."""
        self._remove_leftovers()
        # What can never fit takes nothing away from others.
        entries = sorted(self._names(), key=self._last_used) if size <= self.size else []
        while (missing := self._missing(size)) > 0:
            if not entries:
                raise NoRoom(
                    errno.ENOSPC,
                    f"{_in_words(missing)} more would have to be free for {_in_words(size)}, of "
                    f"the {_in_words(self.size)} that `stage_in.size` allows and the disk has",
                    str(self.folder),
                )
            self.remove(entries.pop(0))

    def _missing(self, size: int) -> int:
        there = [*self._names(), *self._names(aside=True)]
        taken = sum(max(_reserved(path), _bytes(path)) for path in map(self.folder.joinpath, there))
        coming = sum(
            max(_reserved(path) - _bytes(path), 0)
            for path in map(self.folder.joinpath, self._names(aside=True))
        )
        free = shutil.disk_usage(self.folder).free - coming
        return max(taken + size - self.size, size - free)

    def _remove_leftovers(self) -> None:
        """What killed processes were making."""
        for aside in self._names(aside=True):
            name = aside.removeprefix(".").removesuffix(".aside")
            lock = self._lock(name, fcntl.LOCK_EX)
            if lock is not None:
                shutil.rmtree(self.folder / aside, ignore_errors=True)
                os.close(lock)

    def _names(self, *, aside: bool = False) -> list[str]:
        return [
            each.name
            for each in os.scandir(self.folder)
            if each.is_dir(follow_symlinks=False)
            and each.name.startswith(".") is aside
            and (not aside or each.name.endswith(".aside"))
        ]

    def _last_used(self, name: str) -> float:
        with suppress(OSError):
            return (self.folder / name / _SIZE).stat().st_mtime
        return 0.0

    def _path(self, name: str) -> Path:
        return self.folder / name

    def _aside(self, name: str) -> Path:
        return self.folder / f".{name}.aside"

    def _lock_file(self, name: str) -> Path:
        return self.folder / f".{name}.lock"

    def _lock(self, name: str, how: int) -> int | None:
        """The lock of an entry, or None while another process has it."""
        path = self._lock_file(name)
        while True:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, how | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                return None
            except OSError:
                os.close(lock)
                raise
            # Whoever removed the entry has removed the file, too: its lock keeps nobody out.
            with suppress(FileNotFoundError):
                if os.fstat(lock).st_ino == path.stat().st_ino:
                    return lock
            os.close(lock)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Around what must not be counted twice."""
        lock = os.open(self.folder / ".room", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def open_disk(settings: StageIn) -> LocalDisk:
    """The user's own folder on this node's disk; OSError where there can be none."""
    text = os.path.expandvars(settings.folder)
    if "$" in text or not text.startswith("/"):
        raise FileNotFoundError(
            errno.ENOENT, "`stage_in.folder` names a variable that the job does not have", text
        )
    parent = Path(text)
    # Only the last part is made: where a disk is not mounted, its folder lies on another one.
    parent.mkdir(exist_ok=True)
    mode = parent.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise PermissionError(
            errno.EACCES,
            "every user may rename what others have in it: it needs the sticky bit (`chmod +t`)",
            text,
        )
    folder = parent / f"lockstep-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    known = folder.lstat()
    if folder.is_symlink() or known.st_uid != os.getuid() or known.st_mode & 0o077:
        raise PermissionError(
            errno.EACCES, "others may change or read it: remove it, or `chmod 700` it", str(folder)
        )
    return LocalDisk(folder, bytes_of(settings.size))


def _reserved(path: Path) -> int:
    with suppress(OSError, ValueError):
        return int((path / _SIZE).read_text())
    return 0


def _bytes(path: Path) -> int:
    """What lies in a folder, which others may be changing."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                total += Path(folder, name).lstat().st_size if name != _SIZE else 0
    return total


def _in_words(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
