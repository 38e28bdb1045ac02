"""Content hashes as DVC computes them: spec, record and dvc.lock speak of the same thing.

A file is its md5. A folder is the md5 of the sorted list of its files' hashes and relative paths,
with `.dir` behind it. Hashes of files are remembered by (size, mtime, inode), because models are
large; `hash_bytes` remembers nothing, for whoever must know what is there now.
"""

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pipelines.base import atomic
from pipelines.identity.digests import Unreadable, digests
from stages.signature import Known, signature_of

_IGNORED = {"__pycache__"}
_LARGE = 1 << 20
"""A smaller file is read sooner than somebody is asked about it."""


class HashCache:
    """Remembers file hashes between commands, in one JSON file; losing it costs only time."""

    def __init__(
        self, path: Path | None = None, elsewhere: Callable[[Path], str | None] | None = None
    ) -> None:
        """`elsewhere` may know the hash of a large file that is not remembered here."""
        self._path = path
        self._elsewhere = elsewhere
        stored = atomic.read_json(path) if path else None
        self._known: dict[str, list[int | str]] = stored if isinstance(stored, dict) else {}
        self._changed = False

    def of(self, path: Path) -> str:
        """The DVC hash of a file or folder."""
        if not path.is_dir():
            return self.of_files([path])[path]
        files = files_of(path)
        hashes = self.of_files(list(files.values()))
        return hash_listing({name: hashes[file] for name, file in files.items()})

    def of_files(self, paths: list[Path]) -> dict[Path, str]:
        """Each file's hash; what is not there raises."""
        return _all(self.of_those_there(paths), paths)

    def of_those_there(self, paths: Iterable[Path]) -> dict[Path, str]:
        """Each file's hash, unless it went away; those that are not known are read side by side."""
        found: dict[Path, str] = {}
        unknown: dict[Path, list[int | str]] = {}
        for path in paths:
            if (signature := _signature(path)) is None:
                continue
            known = self._known.get(str(path))
            if known and known[:3] == signature:
                found[path] = str(known[3])
            elif (
                self._elsewhere
                and int(signature[0]) >= _LARGE
                and (digest := self._elsewhere(path)) is not None
            ):
                found[path] = digest
            else:
                unknown[path] = signature
        for path, digest in _read(unknown).items():
            found[path] = digest
            if _signature(path) == unknown[path]:  # what was read is what had this signature
                self._known[str(path)] = [*unknown[path], digest]
                self._changed = True
        return found

    def believe(self, known: Mapping[Path, Known]) -> None:
        """Take hashes over from whoever knows them; that of a file which was touched since, not."""
        for path, (signature, md5) in known.items():
            if signature_of(path) == signature:
                size, mtime, inode, _ = signature
                self._known[str(path)] = [size, mtime, inode, md5]
                self._changed = True

    def signed(self, folder: Path) -> dict[Path, Known]:
        """Every file of a folder with its hash, but for those that are changed meanwhile."""
        before = {path: signature_of(path) for path in files_of(folder).values()}
        hashes = self.of_those_there(before)
        return {
            path: Known(signature, hashes[path])
            for path, signature in before.items()
            if signature is not None and signature_of(path) == signature
        }

    def save(self) -> None:
        if self._path and self._changed:
            atomic.write_json(self._path, self._known)
            self._changed = False


class Interrupted(Exception):
    """Hashing was asked to stop."""


def hash_bytes(path: Path, should_stop: Callable[[], bool] = lambda: False) -> str:
    """The DVC hash of a file or folder, every byte read now; the files of a folder side by side.

    What is remembered by size and time says nothing about bytes that rotted on the disk.
    """
    files = files_of(path) if path.is_dir() else {path.name: path}

    def stop_if_asked(*_: int) -> None:
        if should_stop():
            raise Interrupted(f"while hashing {path}")

    read = _all(_read(files.values(), stop_if_asked), files.values())
    found = {name: read[file] for name, file in files.items()}
    return hash_listing(found) if path.is_dir() else found[path.name]


def _read(
    paths: Iterable[Path], progress: Callable[[int, int], None] | None = None
) -> dict[Path, str]:
    """The md5 of each file that is there; what cannot be read raises."""
    read = {}
    for path, digest in digests(paths, progress).items():
        if isinstance(digest, Unreadable):
            if isinstance(digest.error, FileNotFoundError):
                continue
            raise digest.error
        read[path] = digest.md5
    return read


def _signature(path: Path) -> list[int | str] | None:
    """By which a file is known again; None where there is none."""
    signature = signature_of(path)
    # Another name for the same bytes, as DVC gives it, moves the last of its parts.
    return None if signature is None else [*signature[:3]]


def _all(found: dict[Path, str], wanted: Iterable[Path]) -> dict[Path, str]:
    """What was found, which must be all that was wanted."""
    for path in wanted:
        if path not in found:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return found


def files_of(folder: Path) -> dict[str, Path]:
    """What counts of a folder, by relative path."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.is_file() and not _IGNORED.intersection(path.parts)
    }


def hash_listing(hashes: dict[str, str]) -> str:
    """The hash of a folder, from those of its files by relative path."""
    files = [{"md5": hashes[name], "relpath": name} for name in sorted(hashes)]
    return hashlib.md5(json.dumps(files, sort_keys=True).encode()).hexdigest() + ".dir"
