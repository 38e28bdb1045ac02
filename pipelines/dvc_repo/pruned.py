"""Outputs that were removed on purpose, from the workspace and from DVC's cache, to save room.

A list in `.lockstep`, path and hash. Such an output is gone and still recorded: its stage and those
that read it stay up to date, until a stage that is to be computed needs it. Any other missing
output is a reason to compute its stage again, and so is this one once dvc.lock names another hash.
"""

from collections.abc import Mapping
from pathlib import Path

from pipelines.base import atomic
from pipelines.base.repository import Repository


def read_pruned(root: Path) -> dict[str, str]:
    """The hash of what was pruned and has not come back, by path."""
    listed = atomic.read_json(_place(root)) or {}
    return {path: md5 for path, md5 in listed.items() if not (root / path).exists()}


def add_pruned(root: Path, outputs: Mapping[str, str]) -> None:
    """Before anything is removed, so that a kill leaves nothing that looks lost."""
    atomic.write_json(_place(root), {**read_pruned(root), **outputs})


def _place(root: Path) -> Path:
    return Repository(root).home / "pruned.json"
