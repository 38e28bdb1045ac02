"""Removing what nobody will ever look at again: stale files of killed processes, stale outputs.

Everything that is written aside bears a name that says so, and most of it the host and number of
its process. So it can be told what belongs to a process that still works, and the rest can go: at
once where it is known that nobody is at work there, after a day where only another host can know.
That is not needed for a right result: it is about disks that would fill up, and about folders that
people look into. Outputs of policies that params.yaml no longer names are removed where the report
would count them as a change.
"""

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from pipelines.base import atomic
from pipelines.base.locks import hold_lock, is_locked
from pipelines.base.repository import Repository
from pipelines.ledger.entry import Attempt, Entry
from stages.contracts.catalog import bind_all
from stages.contracts.params import Params

_ASIDE = re.compile(r"\..*\.(?P<pid>\d+)\.tmp")
_OUT = re.compile(r"out\.(?P<label>\d+)\..*\.(?P<pid>\d+)")
_PLACES = (
    "",
    "code",
    "runs/*",
    "slurm",
    "slurm/live",
    "tracking",
    "warm/*",
    "jobs/*",
    "jobs/*/[!.]*",
    "jobs/*/[!.]*/attempts",
    "jobs/*/[!.]*/attempts/*",
    "jobs/*/[!.]*/attempts/*/*",
    "sessions/*/*",
    "sessions/*/*/mailbox",
    "chains/*",
    "chains/*/links/*",
)
"""Where files and folders are written aside, below `.lockstep`."""
OF_RECORDED = "out.recorded"
"""Outputs that DVC has, on their way out."""
_MINUTES_S, _DAY_S = 600.0, 86400.0
_SHARED_FOLDERS = ("metrics/iterations", "metrics/evaluations", "artifacts/evaluations")
"""Folders that the report reads as a whole."""


def remove_stale_files(repository: Repository) -> None:
    """Remove what no living process can still be at work on."""
    for place in _PLACES:
        for path in _glob(repository.home, f"{place}/.*.tmp".lstrip("/")):
            name = _ASIDE.fullmatch(path.name)
            if name and (_is_dead(name) or (not _is_ours(name) and _age(path) > _DAY_S)):
                _discard(path)
    for folder in repository.jobs.glob("*/[!.]*"):
        for path in _stale_parts(Entry(folder)):
            _discard(path)
    for chain in repository.home.glob("chains/*"):
        _clear_chain(chain)


def remove_stale_outputs(repository: Repository, params: Params) -> list[str]:
    """DVC leaves the outputs of stages that are gone; returns the paths removed."""
    wanted = {path for node in bind_all(params) for path in (*node.outs.values(), node.metrics)}
    removed = []
    for folder in _SHARED_FOLDERS:
        for path in sorted((repository.root / folder).glob("[!.]*")):
            relative = path.relative_to(repository.root).as_posix()
            if not any(out == relative or out.startswith(f"{relative}/") for out in wanted):
                atomic.remove(path)
                removed.append(relative)
    return removed


def _glob(folder: Path, pattern: str) -> list[Path]:
    """What is there, as far as it can be seen: a folder may go while it is looked through."""
    paths: list[Path] = []
    with suppress(FileNotFoundError):
        paths.extend(folder.glob(pattern))
    return paths


def _stale_parts(entry: Entry) -> Iterator[Path]:
    published = (entry.folder / "record.json").exists()
    for path in entry.folder.glob("out.*"):
        if path.name == OF_RECORDED or _is_abandoned(path, entry, published):
            yield path
    publishing = entry.folder / "publishing"
    # Only whoever has the lease publishes, and may do so again after it was done once.
    if (
        publishing.exists()
        and not entry.has_driver()
        and (published or _age(publishing) > _MINUTES_S)
    ):
        yield publishing
    if published:
        # Its stage is over, whoever was killed before it could tidy up.
        yield entry.folder / "scratch"


def _is_abandoned(out: Path, entry: Entry, published: bool) -> bool:
    """Whether nobody will make outputs of this half of them."""
    name = _OUT.fullmatch(out.name)
    # A worker holds this for as long as it has such a folder.
    if not name or is_locked(entry.folder / f"working.{name['label']}"):
        return False
    if published or _is_dead(name):
        return True
    return not _is_ours(name) and _age(out) > _DAY_S and not entry.state().alive


def _clear_chain(chain: Path) -> None:
    """What its links were placing and, a day after its end, the outputs they handed each other."""
    links = list(chain.glob("links/*"))
    for link in links:
        if (link / "placing").exists():
            with hold_lock(link / "resolve.lock") as held:
                if held:
                    _discard(link / "placing")
    workspace = chain / "workspace"
    if not workspace.exists() or min(map(_age_alone, [chain, *links])) < _DAY_S:
        return
    if not any(Attempt(link).state().alive for link in links):
        _discard(workspace)


def _is_ours(name: re.Match[str]) -> bool:
    return f".{atomic.here()}." in name.string


def _is_dead(name: re.Match[str]) -> bool:
    return _is_ours(name) and not psutil.pid_exists(int(name["pid"]))


def _age(path: Path) -> float:
    """Seconds since anything in it was written."""
    return min(map(_age_alone, [path, *path.rglob("*")]))


def _age_alone(path: Path) -> float:
    with suppress(OSError):
        return time.time() - path.lstat().st_mtime
    return 0.0


def _discard(path: Path) -> None:
    """Another command may be at the same."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        atomic.remove(path)
