"""Which paths git tracks, read once for each index that git has written.

DVC asks for every output of a stage, and reads the whole index for each answer: of a stage with ten
outputs, in a repository of a thousand files, half of DVC's own time. Git writes an index aside and
renames it, so that another one has another inode, size or time.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from scmrepo.git.backend.dulwich import DulwichBackend


def read_index_once() -> None:
    """Have DVC's processes that are forked from this one, and this one, remember what they read."""
    read: dict[tuple[str, int, int, int], frozenset[bytes]] = {}

    def is_tracked(self: DulwichBackend, path: str) -> bool:
        place = self.repo.index_path()
        try:
            index = Path(place).stat()
        except FileNotFoundError:
            return False
        written = (place, index.st_ino, index.st_mtime_ns, index.st_size)
        if written not in read:
            read[written] = _with_folders(self.repo.open_index())
        name = os.path.relpath(path, self.root_dir).replace(os.path.sep, "/")
        return name.encode() in read[written]

    DulwichBackend.is_tracked = is_tracked  # type: ignore[method-assign]


def _with_folders(paths: Iterable[bytes]) -> frozenset[bytes]:
    """The paths, and every folder that has one of them."""
    found: set[bytes] = set()
    for path in paths:
        while path and path not in found:
            found.add(path)
            path = path.rpartition(b"/")[0]
    return frozenset(found)
