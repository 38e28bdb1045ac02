"""dvc.lock, read whole or not at all, and a copy of it for the day a kill has torn it.

DVC writes it in place and piece by piece, so whoever reads it may see half of it: for a moment, or
for good where DVC was killed. The first part of a file may well be YAML, and end with a newline as
the whole does, so what has just changed is looked at again. What git has, and what DVC can read and
lacks nothing that the copy has, is never taken for torn: people edit the file too.
"""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml.error import YAMLError

from pipelines.base import atomic
from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.dvc_repo.lock_text import parse_lock

READ_TIMEOUT_S = 5.0
"""How long to wait for a dvc that writes it, and writes nothing more: it begins with nothing."""
QUIET_S = 0.3
"""DVC puts its pieces on disk in shorter intervals than this."""
SETTLED_S = 2.0
"""Without a newline at its end it is taken for whole when nothing has changed for this long."""
POLL_S = 0.1


def read_stages(root: Path) -> dict[str, Any]:
    """What dvc.lock says of each stage; {} where there is no such file."""
    lock, start = root / "dvc.lock", time.monotonic()
    for text, quiet_s in _watched(lock):
        settled_s = QUIET_S if text.endswith(b"\n") else SETTLED_S
        if quiet_s > settled_s and (values := _parse(text)) is not None:
            stages: dict[str, Any] = values.get("stages", {})
            return stages
        if quiet_s > READ_TIMEOUT_S and time.monotonic() - start > READ_TIMEOUT_S:
            raise LockstepError(
                f"{lock} cannot be read: dvc was killed while it wrote it, and `lockstep "
                "record` puts back what it was before; or git left a conflict in it"
            )
    return {}


def _watched(lock: Path) -> Iterator[tuple[bytes, float]]:
    """Its bytes, time and again, with the seconds for which they have not changed."""
    seen, since = None, 0.0
    while True:
        try:
            with lock.open("rb") as file:
                text = file.read()
                age = time.time() - os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return
        if text != seen:
            seen, since = text, time.monotonic() - max(age, 0.0)
        yield text, time.monotonic() - since
        time.sleep(POLL_S)


def keep_lock(repository: Repository) -> None:
    """Remember dvc.lock as it is now, if it is whole."""
    kept = _kept(repository)
    for text, quiet_s in _watched(repository.root / "dvc.lock"):
        if quiet_s > QUIET_S:
            if _is_whole(text) and _read(kept) != text:
                atomic.write_text(kept, text.decode())
            return


def is_torn(repository: Repository) -> bool:
    """Whether a kill has cut dvc.lock; a conflict of git's is for people to resolve."""
    text = _read(repository.root / "dvc.lock")
    if text is None or _is_whole(text) or b"\n<<<<<<< " in b"\n" + text:
        return False
    if _parse(text) is not None and not _lacks_something(text, _read(_kept(repository))):
        return False
    return not _is_in_git(repository.root)


def restore_lock(repository: Repository, say: Callable[[str], None]) -> None:
    """Make a torn dvc.lock what it was when it was last whole; what is torn is kept aside."""
    lock, kept = repository.root / "dvc.lock", _read(_kept(repository))
    aside = repository.home / "dvc.lock.torn"
    atomic.write_text(aside, lock.read_text(encoding="utf-8", errors="replace"))
    cause = f"dvc.lock is torn: dvc was killed while it wrote it; what is left is in {aside}"
    if kept is not None and _is_whole(kept):
        say(f"{cause}; putting back what it was before")
        atomic.write_text(lock, kept.decode())
    else:
        say(f"{cause}; DVC makes it anew")
        lock.unlink()


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _is_whole(text: bytes) -> bool:
    return text.endswith(b"\n") and _parse(text) is not None


def _parse(text: bytes) -> dict[str, Any] | None:
    """Its values, or None where it is empty or stops at a place where DVC would not read it."""
    try:
        values = parse_lock(text.decode())
        readable = isinstance(values.get("schema", ""), str) and all(
            map(_is_readable, values.get("stages", {}).values())
        )
    except (YAMLError, UnicodeDecodeError, AttributeError):
        return None
    return values if readable else None


def _is_readable(stage: Any) -> bool:
    if not isinstance(stage, dict) or not isinstance(stage.get("cmd", ""), str | list):
        return False
    lists = [stage.get(key, []) for key in ("deps", "outs")]
    return (
        isinstance(stage.get("params", {}), dict)
        and all(isinstance(items, list) for items in lists)
        and all(
            isinstance(item, dict)
            and isinstance(item.get("path"), str)
            and None not in item.values()
            for items in lists
            for item in items
        )
    )


def _lacks_something(text: bytes, kept: bytes | None) -> bool:
    """Whether it stops before its end, by the copy of when it was last whole."""
    before = None if kept is None else _parse(kept)
    if kept is None or before is None or kept == text + b"\n":
        return False
    return kept.startswith(text) or not set(_named(before)) <= set(_named(_parse(text) or {}))


def _named(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, stage in values.get("stages", {}).items():
        yield name, ""
        yield from ((name, out["path"]) for out in stage.get("outs", ()))


def _is_in_git(root: Path) -> bool:
    """Whether the last commit or the index has exactly this file."""
    here = _git(root, "hash-object", "dvc.lock")
    places = ("HEAD:./dvc.lock", ":./dvc.lock")
    return bool(here) and here in [_git(root, "rev-parse", "-q", "--verify", it) for it in places]


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.decode().strip()


def _kept(repository: Repository) -> Path:
    return repository.home / "dvc.lock.whole"
