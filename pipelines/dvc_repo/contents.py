"""What is at a path of the workspace, as DVC hashes it: now, and once stages are restored.

A restored stage's outputs are known before they are there: DVC's run cache names their hashes. They
are laid over the workspace, so that the next stage can be asked what it would find. Nothing is
written but what is remembered of hashes, and each file is looked at once. Stages may be writing all
the while: a file that goes away between two looks is not there.
"""

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from pipelines.dvc_repo.cache_objects import listed_files, object_path
from pipelines.identity.hashing import HashCache, hash_listing

_PROTECTED = 0o444
"""DVC makes what it has in its cache read-only, and trusts what still is."""


class Content(NamedTuple):
    """A file, or a folder with all that is in it."""

    md5: str
    """As DVC writes it, with `.dir` behind that of a folder."""
    is_executable: bool = False


class Contents:
    """The workspace of a clone, and DVC's cache beside it."""

    def __init__(self, root: Path, cache: Path, hashes: HashCache, ignored: frozenset[str]) -> None:
        self._root = root
        self._cache = cache
        self._hashes = hashes
        self._ignored = ignored
        self._now: dict[str, Content | None] = {}
        self._restored: dict[str, Content] = {}
        self._around: set[str] = set()
        """Every folder that has something restored in it."""
        self._in_cache: dict[str, bool] = {}

    def read(self, paths: Iterable[str]) -> None:
        """Read what is there; files whose hash is not known are read side by side."""
        wanted = {path: self._root / path for path in paths if path not in self._now}
        folders = {path: self._files(place) for path, place in wanted.items() if place.is_dir()}
        files = {path: place for path, place in wanted.items() if place.is_file()}
        inside = (place for listed in folders.values() for place in listed.values())
        known = self._hashes.of_those_there([*files.values(), *inside])
        for path in wanted:
            self._now[path] = None
            if path in folders:
                self._now[path] = Content(hash_listing(_hashed(folders[path], known)))
            elif path in files and files[path] in known:
                self._now[path] = Content(known[files[path]], _is_executable(files[path]))

    def now(self, path: str) -> Content | None:
        """What the workspace has there; None where there is nothing."""
        if path not in self._now:
            self.read([path])
        return self._now[path]

    def predict(self, path: str, content: Content) -> None:
        """Take it that this is there now."""
        self._now[path] = content

    def restore(self, path: str, content: Content) -> None:
        """Take it that this is there from now on, out of DVC's cache."""
        self._restored[path] = content
        self._around.update(map(str, PurePosixPath(path).parents))

    def later(self, path: str) -> Content | None:
        """What will be there after all that is restored."""
        if path in self._restored:
            return self._restored[path]
        if path in self._around:
            return Content(hash_listing(self._listed_later(path)))
        for folder in map(str, PurePosixPath(path).parents):
            if folder in self._restored:
                return self._inside(folder, path)
        return self.now(path)

    def has_object(self, md5: str) -> bool:
        """Whether DVC's cache has it, and of a folder each file."""
        if md5 not in self._in_cache:
            place = object_path(self._cache, md5)
            self._in_cache[md5] = self._is_sound(place, md5)
            if self._in_cache[md5] and md5.endswith(".dir"):
                listed = listed_files(place, md5)
                self._in_cache[md5] = listed is not None and all(
                    map(self.has_object, listed.values())
                )
        return self._in_cache[md5]

    def _is_sound(self, place: Path, md5: str) -> bool:
        try:
            mode = stat.S_IMODE(place.stat().st_mode)
        except OSError:
            return False
        whole = md5.removesuffix(".dir")
        return mode == _PROTECTED or self._hashes.of_those_there([place]).get(place) == whole

    def _listed_later(self, folder: str) -> dict[str, str]:
        base = self._root / folder
        inside = {
            path: content
            for path, content in self._restored.items()
            if PurePosixPath(path).is_relative_to(folder)
        }
        there = {
            name: place
            for name, place in self._files(base).items()
            if not any(_is_in(f"{folder}/{name}", path) for path in inside)
        }
        listed = _hashed(there, self._hashes.of_those_there(there.values()))
        for path, content in inside.items():
            below = PurePosixPath(path).relative_to(folder).as_posix()
            if content.md5.endswith(".dir"):
                files = listed_files(object_path(self._cache, content.md5), content.md5) or {}
                listed |= {f"{below}/{name}": md5 for name, md5 in files.items()}
            else:
                listed[below] = content.md5
        return listed

    def _inside(self, folder: str, path: str) -> Content | None:
        """A file or folder within a restored folder."""
        md5 = self._restored[folder].md5
        files = listed_files(object_path(self._cache, md5), md5) or {}
        name = PurePosixPath(path).relative_to(folder).as_posix()
        if name in files:
            return Content(files[name])
        below = {
            file.removeprefix(f"{name}/"): md5
            for file, md5 in files.items()
            if file.startswith(f"{name}/")
        }
        return Content(hash_listing(below)) if below else None

    def _files(self, folder: Path) -> dict[str, Path]:
        """What counts of a folder, by relative path; .dvcignore is about the repository alone."""
        ignored = self._ignored if folder.is_relative_to(self._root) else frozenset()
        return {place.relative_to(folder).as_posix(): place for place in _walk(folder, ignored)}


def _hashed(files: Mapping[str, Path], known: Mapping[Path, str]) -> dict[str, str]:
    return {name: known[place] for name, place in files.items() if place in known}


def _is_executable(file: Path) -> bool:
    try:
        mode = file.stat().st_mode
    except FileNotFoundError:
        return False
    return bool(mode & (stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH))


def _walk(folder: Path, ignored: frozenset[str]) -> Iterator[Path]:
    def counts(name: str) -> bool:
        return name not in ignored and f"*{Path(name).suffix}" not in ignored

    for here, folders, files in os.walk(folder):
        folders[:] = filter(counts, folders)
        yield from (Path(here, name) for name in filter(counts, files))


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")
