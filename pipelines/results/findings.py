"""What `lockstep verify` can find, each with what to do about it.

A remedy never relies on DVC noticing the change by itself. DVC goes by size and time of a file, and
trusts a read-only file of its cache; so what is wrong is removed first, and then brought back.
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
    """In a recorded folder, and not recorded."""
    ROTTED = "rotted"
    """An object of DVC's cache whose bytes do not make its name."""
    UNCACHED = "uncached"
    """As recorded in the workspace, and DVC's cache has no copy."""
    UNRECORDED = "unrecorded"
    """An output of dvc.yaml that dvc.lock has no hash of."""


@dataclass(frozen=True)
class Finding:
    """One thing that is not as recorded."""

    kind: Kind
    path: str
    """In the repository; of an object, in DVC's cache."""
    stage: str | None
    detail: str = ""
    remedies: tuple[str, ...] = ()
    """Commands of which any one mends it; the first that can be run is the one to take."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def checkout(output: Output, *wrong: str) -> tuple[str, ...]:
    """Take it from DVC's cache again."""
    return (_after_removal(wrong, f"dvc checkout {shlex.quote(output.path)}"),)


def bring_back(output: Output, *wrong: str) -> tuple[str, ...]:
    """Fetch it from a remote, or compute it again."""
    pull = _after_removal(wrong, f"dvc pull {shlex.quote(output.path)}")
    return (pull, *compute(output, *wrong))


def compute(output: Output, *wrong: str) -> tuple[str, ...]:
    """Have its stage run; DVC sees that something is missing."""
    return (_after_removal(wrong, f"dvc repro {shlex.quote(output.stage)}"),)


def from_git(output: Output) -> tuple[str, ...]:
    return (f"git checkout -- {shlex.quote(output.path)}",)


def refill(path: str, place: str) -> tuple[str, ...]:
    """Give DVC's cache its copy again, from the workspace."""
    return (f"install -D -m 444 {shlex.join([path, place])}",)


def relist(output: Output, place: str) -> tuple[str, ...]:
    """Have DVC list a folder again that is as recorded, with its stage as recorded too."""
    return (_after_removal((place,), f"dvc commit --force {shlex.quote(output.stage)}"),)


def remove(*paths: str) -> tuple[str, ...]:
    return (f"rm -rf {shlex.join(paths)}",)


def _after_removal(wrong: tuple[str, ...], command: str) -> str:
    return f"{remove(*wrong)[0]} && {command}" if wrong else command
