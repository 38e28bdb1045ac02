"""`lockstep export`: a finished policy as an ordinary Hugging Face folder, with its model card.

Written aside and renamed, so what is there is whole. The files are those of the policy, bit by bit,
unless another dtype is asked for or an adapter is merged: then the compute plane writes
them, in a process of its own.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.base import atomic
from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.export import card
from pipelines.export.provenance import Provenance, find_policy

ADAPTER = "adapter_config.json"
WEIGHTS = ".safetensors"
NOT_FOR_OTHERS = ("allowed_code.json",)
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
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
    provenance = find_policy(repository, policy, revision)
    aside = atomic.unique(folder)
    aside.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_folder(provenance, aside, dtype=dtype, adapter=adapter)
        atomic.sync_tree(aside)
        files = file_hashes(aside)
        if folder.exists():
            old = aside.with_suffix(".old")
            folder.rename(old)
            aside.rename(folder)
            atomic.remove(old)
        else:
            aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return Exported(folder, provenance, files)


def write_folder(
    provenance: Provenance,
    folder: Path,
    *,
    dtype: str | None = None,
    adapter: bool = False,
    link: bool = False,
) -> None:
    """The policy's files, the base model's licence, the card and lineage.json in a new folder.

    `link`: hard links to the policy's files instead of copies, where possible. An adapter is not
    merged then.
    """
    if adapter and not is_adapter(provenance):
        raise LockstepError(
            f"{provenance.policy} is no adapter: its weights are merged (lora.save), or all of "
            "them were trained; leave --adapter out"
        )
    if adapter and dtype:
        raise LockstepError("--dtype is for merged weights: leave --adapter or --dtype out")
    merge = is_adapter(provenance) and not adapter and not link
    copy = atomic.link_tree if link else _copy
    if merge or dtype:
        source = folder.with_name(f"{folder.name}.source")
        try:
            _copy_files(provenance.files, source, atomic.link_tree)
            _convert_weights(source, folder, dtype or "float32")
        finally:
            shutil.rmtree(source, ignore_errors=True)
        for name in NOT_FOR_OTHERS:
            (folder / name).unlink(missing_ok=True)
    else:
        files = provenance.files.items()
        kept = {name: path for name, path in files if Path(name).name not in NOT_FOR_OTHERS}
        _copy_files(kept, folder, copy)
    licences = provenance.licences.items()
    _copy_files({n: p for n, p in licences if not (folder / n).exists()}, folder, copy)
    weights = {name: folder / name for name in _names(folder) if name.endswith(WEIGHTS)}
    _write_card(provenance, folder, weights, dtype, merge=merge)


def rewrite_model_card(provenance: Provenance, folder: Path) -> None:
    """Update the card and lineage.json of files that were written unchanged."""
    files = provenance.files.items()
    weights = {name: path for name, path in files if name.endswith(WEIGHTS)}
    _write_card(provenance, folder, weights, None, merge=False)


def _write_card(
    provenance: Provenance,
    folder: Path,
    weights: Mapping[str, Path],
    dtype: str | None,
    *,
    merge: bool,
) -> None:
    adapter = is_adapter(provenance) and not merge
    # By their names: in the cache a file is called by its hash.
    source = dtypes_of(path for name, path in provenance.files.items() if name.endswith(WEIGHTS))
    sentence = _describe_weights(source, dtype, merge=merge, adapter=adapter)
    hashes = {name: _sha256(path) for name, path in weights.items()}
    text = card.render(provenance, hashes, sentence, adapter=adapter)
    atomic.write_text(folder / "README.md", text)
    atomic.write_json(folder / "lineage.json", card.lineage_json(provenance))


def is_adapter(provenance: Provenance) -> bool:
    """Whether the policy's folder is an adapter beside its base."""
    return ADAPTER in provenance.files


def dtypes_of(files: Iterable[Path]) -> str:
    """The dtypes of safetensors files, from their headers: `float32`, `bfloat16 and float32`."""
    dtypes = set()
    for path in files:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        dtypes |= {tensor["dtype"] for name, tensor in header.items() if name != "__metadata__"}
    return " and ".join(sorted(DTYPES.get(dtype, dtype.lower()) for dtype in dtypes))


def _describe_weights(source: str, dtype: str | None, *, merge: bool, adapter: bool) -> str:
    merged = "The adapter is merged into its base. " if merge else ""
    target = dtype or ("float32" if merge else source)
    if target != source:
        return f"{merged}Weights were converted from {source} to {target} when they were exported."
    if adapter:
        return (
            f"An adapter and, under `base`, the model that it belongs to. Weights are in {source}."
        )
    return f"{merged}Weights are in {source}."


def _copy_files(
    files: Mapping[str, Path], folder: Path, copy: Callable[[Path, Path], None]
) -> None:
    for name, path in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        copy(path, folder / name)


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    target.chmod(0o644)


def _convert_weights(source: Path, target: Path, dtype: str) -> None:
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
        last = (done.stderr.strip().splitlines() or ["no error message"])[-1]
        raise LockstepError(
            f"the weights could not be written as {dtype} ({last}): merging and --dtype need the "
            "compute plane's packages (pip install -e '.[train]')"
        )


def file_hashes(folder: Path) -> dict[str, str]:
    """sha256 of each file below a folder, by name."""
    return {name: _sha256(folder / name) for name in _names(folder)}


def _names(folder: Path) -> list[str]:
    files = sorted(item for item in folder.rglob("*") if item.is_file())
    return [path.relative_to(folder).as_posix() for path in files]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
