"""The code a job runs: a copy of both packages as they were when it was submitted.

Copies are named by a hash over their content, so all jobs of one version share one. What changes in
the workspace while a job waits in a queue cannot reach it.
"""

import hashlib
import os
import shutil
from pathlib import Path

from pipelines.base import atomic
from pipelines.base.git import git
from pipelines.base.repository import Repository

_PACKAGES = ("pipelines", "stages")
LARGEST_DIFF = 1 << 20


def take_snapshot(repository: Repository) -> Path:
    """The folder that holds the code of this moment; put it on PYTHONPATH."""
    files = _sources(repository.root)
    digest = hashlib.sha256()
    for name, data in files.items():
        digest.update(f"{name} {len(data)}\n".encode() + data)
    folder = repository.home / "code" / digest.hexdigest()[:16]
    if not folder.is_dir():
        aside = atomic.unique(folder)
        for name, data in files.items():
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            (aside / name).write_bytes(data)
        _put_in_place(aside, folder)
    return folder


def uncommitted(repository: Repository) -> str:
    """What the tracked files hold beyond the commit, as a patch; new files are in the snapshot."""
    words = ("diff", "HEAD", "--no-color", "--", *_PACKAGES, "params.yaml", "dvc.yaml")
    return (git(repository.root, *words) or "")[:LARGEST_DIFF]


def _sources(root: Path) -> dict[str, bytes]:
    """What each file holds, by name, sorted. Each stage begins with this, so it has to be quick."""
    found: dict[str, bytes] = {}
    for package in _PACKAGES:
        if (root / package).is_dir():
            _read(str(root / package), package, found)
    return dict(sorted(found.items()))


def _read(folder: str, name: str, found: dict[str, bytes]) -> None:
    with os.scandir(folder) as entries:
        for each in entries:
            inside = f"{name}/{each.name}"
            if each.is_file():
                found[inside] = Path(each.path).read_bytes()
            elif each.is_dir(follow_symlinks=False) and each.name != "__pycache__":
                _read(each.path, inside, found)


def _put_in_place(aside: Path, folder: Path) -> None:
    """Another command may have made the very same folder in the meantime."""
    try:
        aside.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(aside)
