"""`lockstep export`: a finished policy as an ordinary Hugging Face folder, with its model card.

Written aside and renamed, so what is there is whole. The files are those of the policy, bit by bit,
unless another type of number is asked for or an adapter is merged: then the compute plane writes
them, in a process of its own.
"""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.base import atomic
from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.export import card
from pipelines.export.number_types import types_of
from pipelines.export.provenance import Provenance, find_policy

ADAPTER = "adapter_config.json"
WEIGHTS = ".safetensors"
NOT_FOR_OTHERS = ("allowed_code.json",)
CODE = Path(__file__).resolve().parents[2]
"""Where both planes can be imported from."""


@dataclass(frozen=True)
class Exported:
    """What was written where."""

    folder: Path
    provenance: Provenance
    files: Mapping[str, str]
    """sha256 of each file."""

    def as_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "policy": self.provenance.policy,
            "hash": self.provenance.artifact.hash,
            "stage": self.provenance.stage_run.stage,
            "commit": self.provenance.commit,
            "params_hash": self.provenance.params_hash,
            "files": dict(self.files),
        }


def export(
    repository: Repository,
    policy: str,
    folder: Path,
    *,
    revision: str | None = None,
    dtype: str | None = None,
    adapter: bool = False,
    force: bool = False,
) -> Exported:
    """Write the folder; LockstepError where it exists, unless `force`."""
    folder = folder.absolute()
    if folder.exists() and not force:
        raise LockstepError(f"{folder} already exists: name another folder, or pass --force")
    if repository.root / "artifacts" in (folder, *folder.parents):
        raise LockstepError(f"{folder} is among the artifacts, which are DVC's: name another place")
    found = find_policy(repository, policy, revision)
    aside = atomic.unique(folder)
    aside.parent.mkdir(parents=True, exist_ok=True)
    try:
        compose(found, aside, dtype=dtype, adapter=adapter)
        atomic.sync_tree(aside)
        files = hashes(aside)
        if folder.exists():
            old = aside.with_suffix(".old")
            folder.rename(old)
            aside.rename(folder)
            atomic.remove(old)
        else:
            aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return Exported(folder, found, files)


def compose(
    found: Provenance,
    folder: Path,
    *,
    dtype: str | None = None,
    adapter: bool = False,
    link: bool = False,
) -> None:
    """The policy's files, the base model's licence, the card and lineage.json in a new folder.

    `link`: give the policy's files second names instead of copying them, where that can be done.
    An adapter stays one then.
    """
    if adapter and not is_adapter(found):
        raise LockstepError(
            f"{found.policy} is no adapter: its weights are merged (lora.save), or all of them "
            "were trained; leave --adapter out"
        )
    if adapter and dtype:
        raise LockstepError("--dtype is for merged weights: leave --adapter or --dtype out")
    merge = is_adapter(found) and not adapter and not link
    put = atomic.link_tree if link else _copy
    if merge or dtype:
        source = folder.with_name(f"{folder.name}.source")
        try:
            _put(found.files, source, atomic.link_tree)
            _rewrite(source, folder, dtype or "float32")
        finally:
            shutil.rmtree(source, ignore_errors=True)
        for name in NOT_FOR_OTHERS:
            (folder / name).unlink(missing_ok=True)
    else:
        kept = {n: p for n, p in found.files.items() if Path(n).name not in NOT_FOR_OTHERS}
        _put(kept, folder, put)
    _put({n: p for n, p in found.licences.items() if not (folder / n).exists()}, folder, put)
    weights = {name: folder / name for name in _names(folder) if name.endswith(WEIGHTS)}
    _put_words(found, folder, weights, dtype, merge=merge)


def describe_anew(found: Provenance, folder: Path) -> None:
    """The card and lineage.json of files that were composed as they are, by what is known now."""
    weights = {name: path for name, path in found.files.items() if name.endswith(WEIGHTS)}
    _put_words(found, folder, weights, None, merge=False)


def _put_words(
    found: Provenance, folder: Path, weights: Mapping[str, Path], dtype: str | None, *, merge: bool
) -> None:
    adapter = is_adapter(found) and not merge
    # By their names: in the cache a file is called by its hash.
    was = types_of(path for name, path in found.files.items() if name.endswith(WEIGHTS))
    how = _words(was, dtype, merge=merge, adapter=adapter)
    digests = {name: _digest(path) for name, path in weights.items()}
    atomic.write_text(folder / "README.md", card.render(found, digests, how, adapter=adapter))
    atomic.write_json(folder / "lineage.json", card.lineage_json(found))


def is_adapter(found: Provenance) -> bool:
    """Whether the policy's folder is an adapter beside its base."""
    return ADAPTER in found.files


def _words(was: str, dtype: str | None, *, merge: bool, adapter: bool) -> str:
    merged = "The adapter is merged into its base. " if merge else ""
    became = dtype or ("float32" if merge else was)
    if became != was:
        return f"{merged}Weights were converted from {was} to {became} when they were exported."
    if adapter:
        return f"An adapter and, under `base`, the model that it belongs to. Weights are in {was}."
    return f"{merged}Weights are in {was}."


def _put(files: Mapping[str, Path], folder: Path, put: Any) -> None:
    for name, path in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        put(path, folder / name)


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    target.chmod(0o644)


def _rewrite(source: Path, target: Path, dtype: str) -> None:
    """By the compute plane: this one has no torch."""
    done = subprocess.run(
        [sys.executable, "-m", "stages.engines.models.exported", source, target, dtype],
        cwd=CODE,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise LockstepError(
            f"the weights could not be written as {dtype} ({last}): merging and --dtype need the "
            "compute plane's packages (pip install -e '.[train]')"
        )


def hashes(folder: Path) -> dict[str, str]:
    """sha256 of each file below a folder, by name."""
    return {name: _digest(folder / name) for name in _names(folder)}


def _names(folder: Path) -> list[str]:
    files = sorted(item for item in folder.rglob("*") if item.is_file())
    return [path.relative_to(folder).as_posix() for path in files]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
