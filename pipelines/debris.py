"""What killed processes left behind, and nobody will ever look at again.

Everything that is written aside bears a name that says so, and most of it the host and number of
its process. So it can be told what belongs to a process that still works, and the rest can go.
Nothing here is needed for a right result: it is about disks that would fill up, and about folders
that people look into.
"""

import re
import shutil
import socket
from pathlib import Path

import psutil

from pipelines import atomic
from pipelines.repository import Repository

_ASIDE = re.compile(r"\..*\.(?P<pid>\d+)\.tmp")
_PLACES = (
    "",
    "code",
    "runs/*",
    "slurm",
    "slurm/live",
    "tracking",
    "jobs/*",
    "jobs/*/[!.]*",
    "jobs/*/[!.]*/attempts",
    "jobs/*/[!.]*/attempts/*",
    "jobs/*/[!.]*/attempts/*/tasks",
)
"""Where files and folders are written aside, below `.lockstep`."""


def clear_debris(repository: Repository) -> None:
    """Remove what no living process can still be at work on."""
    for place in _PLACES:
        for path in repository.home.glob(f"{place}/.*.tmp".lstrip("/")):
            if _is_abandoned(path):
                _discard(path)
    for entry in repository.jobs.glob("*/[!.]*"):
        if (entry / "record.json").exists():
            # Published: its stage is over, whoever was killed before it could tidy up.
            _discard(entry / "scratch")


def _is_abandoned(path: Path) -> bool:
    found = _ASIDE.fullmatch(path.name)
    ours = found is not None and f".{socket.gethostname()}." in path.name
    return ours and not psutil.pid_exists(int(found["pid"])) if found else False


def _discard(path: Path) -> None:
    """Another command may be at the same."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        atomic.remove(path)
