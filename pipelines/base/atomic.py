"""Atomic file writes: a file exists completely or not at all, whatever is killed and when."""

import json
import os
import shutil
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

_SPACE_OF_THE_HOST = "4026531836"
"""Linux's id of the PID namespace outside all containers."""


def write_text(path: Path, text: str) -> None:
    """Write a temporary file, flush it to disk, rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = unique(path)
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        # Errors of write and fsync do not name the file.
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def unique(path: Path) -> Path:
    """A temporary name beside `path` that no other process of the cluster or thread uses."""
    return path.with_name(f".{path.name}.{here()}.{threading.get_ident()}.{os.getpid()}.tmp")


def here() -> str:
    """This host; in a container with its own PID namespace, that container.

    Two processes with the same host and pid would take each other for dead, or for themselves.
    """
    host = socket.gethostname()
    try:
        space = "".join(filter(str.isdigit, str(Path("/proc/self/ns/pid").readlink())))
    except OSError:
        return host
    return host if space == _SPACE_OF_THE_HOST else f"{host}~{space}"


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def read_json(path: Path) -> Any | None:
    """The file's value, or None if the file does not exist."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def load_json(path: Path) -> Any:
    """The value of a file that must exist."""
    return json.loads(path.read_text(encoding="utf-8"))


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def link_tree(source: Path, target: Path) -> None:
    """Hard-link a file or folder to `target`; copy where links cannot be made."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, copy_function=_link_or_copy)
    else:
        _link_or_copy(str(source), str(target))


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def sync_tree(path: Path) -> None:
    """Flush a file or every file of a folder to disk, so that no rename precedes its data."""
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(file)) from error
        finally:
            os.close(descriptor)
