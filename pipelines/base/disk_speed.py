"""How fast a file system takes data that is flushed to the disk, and what room it has.

Data is written in pieces that are each flushed, so that a node's memory does not pass for the disk.
"""

import os
import time
from pathlib import Path

PIECE = bytes(range(256)) * (1 << 15)
"""8 MiB."""


def write_speed(path: Path, seconds: float, most_pieces: int) -> float:
    """GB/s of a file that is written for so long, one piece at least; the file stays."""
    started, pieces = time.monotonic(), 0
    with path.open("wb", buffering=0) as file:
        while pieces < most_pieces and (not pieces or time.monotonic() - started < seconds):
            left = memoryview(PIECE)
            while left:
                # A disk that fills up takes a part, and refuses the rest.
                left = left[file.write(left) :]
            os.fdatasync(file.fileno())
            pieces += 1
    return pieces * len(PIECE) / (time.monotonic() - started) / 1e9


def free_bytes(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize
