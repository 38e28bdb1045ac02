"""Copies of large Parquet files in small row groups, for pages that show rows from their middle.

A stage writes up to a million rows in one row group, of which a reader has to decode all that come
before the rows it wants. What stages write is hashed and stays as it is: the server keeps a copy
with the same rows under `.lockstep/ui/rows`, made in the background at the first look at a file.
Until it is there, and where there is no room for it, the file itself is read. A copy belongs to a
file as it is now; the copies that were not read for longest are removed.
"""

import hashlib
import os
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.base import atomic

LARGE = 1 << 16
"""A file with more rows in a row group is copied."""
GROUP = 1 << 14
MOST_COPIES = 9
"""Those of three iterations."""
DAY_S = 86400.0
FREE = 4
"""So many times the size of a file have to be free on the disk."""

_lock = threading.Lock()
_under_way: set[Path] = set()
_one_at_a_time = threading.Lock()


def best_copy(path: Path, folder: Path) -> Path:
    """The copy of a file if there is one, else the file; then a copy may be under way."""
    try:
        copy, size = copy_of(path, folder), path.stat().st_size
    except FileNotFoundError:
        return path  # whoever reads it says so
    with suppress(OSError):
        os.utime(copy)  # it was read now
        return copy
    with _lock:
        if copy not in _under_way and _is_large(path) and _has_room(folder, size):
            _under_way.add(copy)
            threading.Thread(target=_copy_aside, args=(path, copy), daemon=True).start()
    return path


def copy_of(path: Path, folder: Path) -> Path:
    """Where the copy is of a file as it is now; one is enough of a file with several names."""
    stat = path.stat()
    version = f"{stat.st_dev} {stat.st_ino} {stat.st_mtime_ns} {stat.st_size}"
    name = hashlib.sha256(version.encode()).hexdigest()[:16]
    return folder / f"{path.stem}-{name}.parquet"


def _is_large(path: Path) -> bool:
    try:
        metadata = pq.read_metadata(path)
    except (OSError, ValueError):
        return False
    return any(metadata.row_group(i).num_rows > LARGE for i in range(metadata.num_row_groups))


def _has_room(folder: Path, size: int) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    return shutil.disk_usage(folder).free > FREE * size


def _copy_aside(path: Path, copy: Path) -> None:
    aside = atomic.unique(copy)
    try:
        # Pages that somebody waits for come first.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        with _one_at_a_time:
            write_copy(path, aside)
            os.replace(aside, copy)
            _remove_old(copy.parent)
    except (OSError, pa.ArrowException):
        aside.unlink(missing_ok=True)  # the file itself is read, which says what is wrong with it
    finally:
        with _lock:
            _under_way.discard(copy)


def write_copy(path: Path, copy: Path) -> None:
    """The same rows in small groups, decoded and written a group at a time."""
    with (
        pq.ParquetFile(path, memory_map=True) as file,
        pq.ParquetWriter(copy, file.schema_arrow, compression="zstd") as writer,
    ):
        for batch in file.iter_batches(GROUP, use_threads=False):
            writer.write_batch(batch)


def _remove_old(folder: Path) -> None:
    copies = sorted(folder.glob("*.parquet"), key=lambda path: path.stat().st_mtime)
    # A server that ended while it copied has left a file.
    left = [path for path in folder.glob(".*.tmp") if path.stat().st_mtime < time.time() - DAY_S]
    for old in [*copies[:-MOST_COPIES], *left]:
        old.unlink(missing_ok=True)
