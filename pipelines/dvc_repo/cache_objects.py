"""DVC's cache on disk: each object is named by the md5 of what it holds.

The object of a folder, `.dir` behind its name, lists the folder's files with their hashes.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

_HEX = frozenset("0123456789abcdef")


def listed_files(place: Path, name: str) -> dict[str, str] | None:
    """The files of a folder as the cache lists them; None where the list is gone or not whole."""
    try:
        content = place.read_bytes()
    except OSError:
        return None
    if hashlib.md5(content).hexdigest() != name.removesuffix(".dir"):
        return None
    return {row["relpath"]: row["md5"] for row in json.loads(content)}


def object_path(cache: Path, md5: str) -> Path:
    """Where DVC's cache keeps what has this hash."""
    return cache / md5[:2] / md5[2:]


def objects_in(cache: Path) -> Iterator[Path]:
    """Everything in the cache that is named by a hash."""
    for path in sorted(cache.glob("[0-9a-f][0-9a-f]/*")):
        if len(hash_in_name(path)) == 32 and _HEX.issuperset(hash_in_name(path)):
            yield path


def hash_in_name(path: Path) -> str:
    return path.parent.name + path.name.removesuffix(".dir")
