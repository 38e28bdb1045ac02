"""By which a file is known again, so that a hash of its bytes can be believed without reading them.

Size, time of the last write and inode, as DVC has it, and the time of the last change of any kind:
no program can put that one back. It also moves with another name or mode for the same bytes, so it
tells of files that nobody links or protects between two looks.
"""

from pathlib import Path
from typing import NamedTuple


class Signature(NamedTuple):
    size: int
    mtime_ns: int
    inode: int
    ctime_ns: int


class Known(NamedTuple):
    """What a file held when it had this signature."""

    signature: Signature
    md5: str


def signature_of(path: Path) -> Signature | None:
    """None where there is no file."""
    try:
        stat = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Signature(stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_ctime_ns)
