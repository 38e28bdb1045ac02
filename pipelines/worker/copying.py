"""Copies of files, several at a time, which can be watched and stopped, and are synced at the end.

A block at a time goes through this process: one sees how far it is, whatever the file systems are.
"""

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

_BLOCK = 1 << 22
_TICK_S = 0.5
_MOST_THREADS = 8
"""A shared file system gives one reader a fraction of what it gives several."""


def copy_files(files: Mapping[Path, Path], progress: Callable[[int], None]) -> None:
    """Copy each file to where it shall be, whose folders are made.

    `progress` is called now and then with the bytes done, and may raise.
    """
    done, lock, stopped = [0], threading.Lock(), threading.Event()

    def copied(source: Path, target: Path) -> None:
        block = memoryview(bytearray(_BLOCK))
        with source.open("rb", buffering=0) as reading, target.open("xb", buffering=0) as writing:
            while not stopped.is_set() and (count := reading.readinto(block)):
                left = block[:count]
                while left:
                    left = left[writing.write(left) :]
                with lock:
                    done[0] += count
            os.fsync(writing.fileno())
        target.chmod(source.stat().st_mode & 0o777)

    for folder in {target.parent for target in files.values()}:
        folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max_workers=_MOST_THREADS) as pool:
        # The largest first, so that the last to end is a small one.
        order = sorted(files, key=lambda source: -source.stat().st_size)
        futures = [pool.submit(copied, source, files[source]) for source in order]
        waiting: set[Future[None]] = set(futures)
        try:
            while waiting:
                ended, waiting = wait(waiting, timeout=_TICK_S, return_when=FIRST_COMPLETED)
                for future in ended:
                    future.result()
                progress(done[0])
        except BaseException:
            stopped.set()
            pool.shutdown(cancel_futures=True)
            raise
