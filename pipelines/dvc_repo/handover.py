"""DVC is handed the hashes of what was just published, and reads none of it again to hash it.

DVC remembers the hash of a file by path, inode, size and time, in a database of its own. What a job
has hashed is entered there before DVC looks, each file only if it is as it was when it was hashed.
Where that fails, or somebody is killed on the way, DVC finds nothing and reads: it costs only time.

A process forked from one that has DVC's database open must not open it. So the driver leaves the
hashes in a file, and where it was forked from DVC, that process takes them when the driver is done.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.base import atomic
from pipelines.base.repository import Repository
from stages.signature import Known, Signature, signature_of

DVC_TAKES_THEM = "LOCKSTEP_DVC_TAKES_HASHES"
"""Set in a driver whose DVC looks for what it leaves."""
_LARGE = 1 << 20
"""DVC reads a smaller file sooner than it looks it up."""
_WORTH_AN_IMPORT = 1 << 28
"""DVC reads fewer bytes sooner than another process imports it."""


def leave(repository: Repository, stage: str, known: Mapping[Path, Known]) -> None:
    """Have DVC take over the hashes of the stage's published files."""
    large = {path: each for path, each in known.items() if each.signature.size >= _LARGE}
    in_all = sum(each.signature.size for each in large.values())
    dvc_takes_them = DVC_TAKES_THEM in os.environ
    if not large or not (dvc_takes_them or in_all >= _WORTH_AN_IMPORT):
        return
    lines = {str(path): [*signature, md5] for path, (signature, md5) in large.items()}
    try:
        atomic.write_json(_place(repository, stage), lines)
    except OSError:
        return  # a full disk, say: what is published is no worse for it
    if not dvc_takes_them:
        take(repository, stage)


def take(repository: Repository, stage: str) -> None:
    """Enter in DVC's database what was left for it."""
    place = _place(repository, stage)
    try:
        if lines := atomic.read_json(place):
            _enter(repository, {Path(p): Known(Signature(*v[:4]), v[4]) for p, v in lines.items()})
    except Exception as error:
        # DVC's own matters, from a full disk to a database that it cannot read: it has its say.
        print(f"{stage}: DVC hashes its outputs again: {error}", file=sys.stderr, flush=True)
    place.unlink(missing_ok=True)


def _enter(repository: Repository, known: Mapping[Path, Known]) -> None:
    from dvc.repo import Repo
    from dvc_data.hashfile.hash_info import HashInfo

    with Repo(str(repository.root)) as repo:
        items: list[tuple[str, Any, dict[str, Any]]] = []
        for path, (signature, md5) in known.items():
            info = repo.fs.info(str(path))
            if signature_of(path) == signature:  # so `info` is of what was hashed
                items.append((str(path), HashInfo("md5", md5), info))
        repo.state.save_many(items, repo.fs)


def _place(repository: Repository, stage: str) -> Path:
    return repository.home / "handover" / f"{stage}.json"
