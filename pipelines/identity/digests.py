"""The md5 of files, read whole, several at a time: hashing a block lets go of Python's lock.

A file that has two names, as a hard link into DVC's cache gives it, is read once. What cannot be
read is no reason to stop: its error stands in place of its hash.
"""

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

_BLOCK = 1 << 20
_TICK_S = 0.2
_MOST_THREADS = 8
"""More would only wait for the disk, and take cores from whoever works beside this."""


@dataclass(frozen=True)
class Digest:
    """What one file holds."""

    md5: str
    size: int
    identity: tuple[int, int]
    """Device and inode: two names with the same are one file."""


@dataclass(frozen=True)
class Unreadable:
    """Why a file could not be read."""

    error: OSError

    @property
    def reason(self) -> str:
        return self.error.strerror or str(self.error)


def digests(
    paths: Iterable[Path],
    progress: Callable[[int, int], None] | None = None,
    *,
    from_disk: bool = False,
) -> dict[Path, Digest | Unreadable]:
    """Every file's digest; files that do not exist are left out.

    `progress` is called now and then with the bytes done and the bytes in all, and may raise.
    `from_disk` has the disk asked, not the memory that remembers what was once written to it.
    """
    found: dict[Path, Digest | Unreadable] = {}
    names: dict[tuple[int, int], list[Path]] = {}
    sizes: dict[tuple[int, int], int] = {}
    for path in dict.fromkeys(paths):
        try:
            stat = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            found[path] = Unreadable(error)
            continue
        identity = (stat.st_dev, stat.st_ino)
        names.setdefault(identity, []).append(path)
        sizes[identity] = stat.st_size
    done = _Counter()
    with ThreadPoolExecutor(max_workers=_num_threads()) as pool:
        # The largest first, so that the last to end is a small one.
        order = sorted(names, key=lambda identity: -sizes[identity])
        futures = {pool.submit(_digest, names[i][0], i, done, from_disk): i for i in order}
        waiting: set[Future[Digest | Unreadable]] = set(futures)
        try:
            while waiting:
                _, waiting = wait(waiting, timeout=_TICK_S, return_when=FIRST_COMPLETED)
                if progress:
                    progress(done.value, sum(sizes.values()))
        except BaseException:
            done.stopped = True
            pool.shutdown(cancel_futures=True)
            raise
    for future, identity in futures.items():
        found |= dict.fromkeys(names[identity], future.result())
    return found


def _num_threads() -> int:
    """As many as this process may use cores, which a job's share of a node limits."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(own, _MOST_THREADS)


class _Counter:
    """Bytes read so far, by all threads."""

    def __init__(self) -> None:
        self.value = 0
        self.stopped = False
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.value += count


def _digest(
    path: Path, identity: tuple[int, int], done: _Counter, from_disk: bool
) -> Digest | Unreadable:
    hasher = hashlib.md5(usedforsecurity=False)
    block = memoryview(bytearray(_BLOCK))
    size = 0
    try:
        with path.open("rb", buffering=0) as file:
            if from_disk:
                _forget_pages(file.fileno())
            while not done.stopped and (count := file.readinto(block)):
                hasher.update(block[:count])
                size += count
                done.add(count)
    except OSError as error:
        return Unreadable(error)
    return Digest(hasher.hexdigest(), size, identity)


def _forget_pages(descriptor: int) -> None:
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
