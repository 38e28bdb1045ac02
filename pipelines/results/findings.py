"""The findings of `lockstep verify`, each with its remedies.

A remedy never relies on DVC noticing the change by itself. DVC goes by size and time of a file, and
trusts a read-only file of its cache; so what is wrong is removed first, and then restored.
"""

import shlex
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from pipelines.dvc_repo.recorded import Output


class Kind(StrEnum):
    """What is wrong."""

    CHANGED = "changed"
    """The workspace has other bytes than were recorded."""
    MISSING = "missing"
    """Not in the workspace; DVC's cache, or git, has it."""
    LOST = "lost"
    """Neither in the workspace nor in DVC's cache: as after `git clone`."""
    EXTRA = "extra"
    """In a recorded folder, but not recorded."""
    ROTTED = "rotted"
    """An object of DVC's cache whose bytes do not match its name."""
    UNCACHED = "uncached"
    """As recorded in the workspace, but DVC's cache has no copy."""
    UNRECORDED = "unrecorded"
    """An output of dvc.yaml for which dvc.lock has no hash."""


@dataclass(frozen=True)
class Finding:
    """One thing that is not as recorded."""

    kind: Kind
    path: str
    """In the repository; for an object, in DVC's cache."""
    stage: str | None
    detail: str = ""
    remedies: tuple[str, ...] = ()
    """Commands, any one of which fixes it; use the first that can be run."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def checkout(output: Output, *wrong: str) -> tuple[str, ...]:
    """Restore it from DVC's cache."""
    return (_after_removal(wrong, f"dvc checkout {shlex.quote(output.path)}"),)


def bring_back(output: Output, *wrong: str) -> tuple[str, ...]:
    """Fetch it from a remote, or recompute it."""
    pull = _after_removal(wrong, f"dvc pull {shlex.quote(output.path)}")
    return (pull, *compute(output, *wrong))


def compute(output: Output, *wrong: str) -> tuple[str, ...]:
    """Rerun its stage; DVC sees that something is missing."""
    return (_after_removal(wrong, f"dvc repro {shlex.quote(output.stage)}"),)


def from_git(output: Output) -> tuple[str, ...]:
    return (f"git checkout -- {shlex.quote(output.path)}",)


def refill(path: str, place: str) -> tuple[str, ...]:
    """Copy it from the workspace into DVC's cache."""
    return (f"install -D -m 444 {shlex.join([path, place])}",)


def relist(output: Output, place: str) -> tuple[str, ...]:
    """Recreate the listing of a folder that is as recorded, for a stage that is as recorded."""
    return (_after_removal((place,), f"dvc commit --force {shlex.quote(output.stage)}"),)


def remove(*paths: str) -> tuple[str, ...]:
    return (f"rm -rf {shlex.join(paths)}",)


def _after_removal(wrong: tuple[str, ...], command: str) -> str:
    return f"{remove(*wrong)[0]} && {command}" if wrong else command
