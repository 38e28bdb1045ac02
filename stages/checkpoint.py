"""Resume state in a stage's scratch folder: whole or not there at all.

A checkpoint is a folder `checkpoint-STEP` with tensors, values and a manifest of their hashes. It
is written aside, synced and renamed, so a kill leaves either the old state or the new. One that
fails its hashes is skipped for the one before it; the last two are kept.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """What a stage needs to go on after `step`."""

    step: int
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]
    """JSON."""


def save_checkpoint(scratch: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint aside and put it in place."""
    final = scratch / f"checkpoint-{checkpoint.step:08d}"
    aside = scratch / f".{final.name}.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    tensors = {name: tensor.detach().contiguous() for name, tensor in checkpoint.tensors.items()}
    contents = {
        "tensors.safetensors": save_tensors(tensors),
        "values.json": json.dumps(dict(checkpoint.values)).encode(),
    }
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    contents["manifest.json"] = json.dumps(hashes).encode()
    for name, data in contents.items():
        _write_synced(aside / name, data)
    _sync_folder(aside)
    if final.exists():
        shutil.rmtree(final)
    aside.rename(final)
    _sync_folder(scratch)
    for old in _newest_first(scratch)[KEPT:]:
        shutil.rmtree(old)


def load_checkpoint(scratch: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None."""
    for folder in _newest_first(scratch):
        try:
            hashes = json.loads((folder / "manifest.json").read_bytes())
            data = {name: (folder / name).read_bytes() for name in hashes}
        except (OSError, ValueError):
            continue
        if all(hashlib.sha256(data[name]).hexdigest() == hashes[name] for name in hashes):
            return Checkpoint(
                step=int(folder.name.rpartition("-")[2]),
                tensors=load_tensors(data["tensors.safetensors"]),
                values=json.loads(data["values.json"]),
            )
    return None


def _newest_first(scratch: Path) -> list[Path]:
    return sorted(scratch.glob("checkpoint-*"), reverse=True)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
