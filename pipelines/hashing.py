"""Content hashes as DVC computes them: spec, record and dvc.lock speak of the same thing.

A file is its md5. A folder is the md5 of the sorted list of its files' hashes and relative paths,
with `.dir` behind it. Hashes of files are remembered by (size, mtime, inode), because models are
large.
"""

import hashlib
import json
from pathlib import Path

from pipelines import atomic

_CHUNK = 1 << 20
_IGNORED = {"__pycache__"}


class HashCache:
    """Remembers file hashes between commands, in one JSON file; losing it costs only time."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        stored = atomic.read_json(path) if path else None
        self._known: dict[str, list[int | str]] = stored if isinstance(stored, dict) else {}
        self._changed = False

    def of(self, path: Path) -> str:
        """The DVC hash of a file or folder."""
        return self._folder(path) if path.is_dir() else self._file(path)

    def save(self) -> None:
        if self._path and self._changed:
            atomic.write_json(self._path, self._known)
            self._changed = False

    def _folder(self, folder: Path) -> str:
        files = [
            {"md5": self._file(path), "relpath": path.relative_to(folder).as_posix()}
            for path in folder.rglob("*")
            if path.is_file() and not _IGNORED.intersection(path.parts)
        ]
        files.sort(key=lambda entry: entry["relpath"])
        return hashlib.md5(json.dumps(files, sort_keys=True).encode()).hexdigest() + ".dir"

    def _file(self, path: Path) -> str:
        stat = path.stat()
        signature: list[int | str] = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        known = self._known.get(str(path))
        if known and known[:3] == signature:
            return str(known[3])
        digest = hashlib.md5()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        self._known[str(path)] = [*signature, digest.hexdigest()]
        self._changed = True
        return digest.hexdigest()
