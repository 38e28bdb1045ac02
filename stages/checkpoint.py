"""Resume state in a stage's scratch folder: whole or not there at all.

A checkpoint is a folder `checkpoint-STEP` with tensors, values and a manifest of their hashes. It
is written aside, synced and renamed, so a kill leaves either the old state or the new, and a write
that fails leaves the old one and no debris. One that fails its hashes, or does not fit who wants to
go on from it, is skipped for the one before it; the last two are kept.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

KEPT = 2
TENSORS, VALUES, MANIFEST = "tensors.safetensors", "values.json", "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """What a stage needs to go on after `step`."""

    step: int
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]
    """JSON."""


def save_checkpoint(scratch: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint aside and put it in place; what is half written is removed again."""
    final = scratch / f"checkpoint-{checkpoint.step:08d}"
    aside = scratch / f".{final.name}.tmp"
    tensors = {name: tensor.detach().contiguous() for name, tensor in checkpoint.tensors.items()}
    contents = {
        TENSORS: save_tensors(tensors),
        VALUES: json.dumps(dict(checkpoint.values)).encode(),
    }
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    contents[MANIFEST] = json.dumps(hashes).encode()
    for left in scratch.glob(".checkpoint-*.tmp"):
        shutil.rmtree(left, ignore_errors=True)
    try:
        aside.mkdir()
        for name, data in contents.items():
            _write_synced(aside / name, data)
        _sync_folder(aside)
        if final.exists():
            shutil.rmtree(final)
        aside.rename(final)
        _sync_folder(scratch)
    except OSError:
        # On a full disk, half a checkpoint only takes room from what can still be written.
        shutil.rmtree(aside, ignore_errors=True)
        raise
    for old in _newest_first(scratch)[KEPT:]:
        shutil.rmtree(old)


def load_checkpoint(
    scratch: Path, fits: Callable[[Checkpoint], bool] = lambda _: True
) -> Checkpoint | None:
    """The newest checkpoint that is whole and fits, or None."""
    for folder in _newest_first(scratch):
        found = _read(folder)
        if found is not None and fits(found):
            return found
    return None


def drop_checkpoints_after(scratch: Path, step: int) -> None:
    """Remove those past `step`: broken, or they would have been gone on from."""
    for folder in _newest_first(scratch):
        if folder.name > f"checkpoint-{step:08d}":
            shutil.rmtree(folder, ignore_errors=True)


def _read(folder: Path) -> Checkpoint | None:
    """The checkpoint in the folder if it is as it was written."""
    try:
        step = int(folder.name.rpartition("-")[2])
        hashes = json.loads((folder / MANIFEST).read_bytes())
        data = {name: (folder / name).read_bytes() for name in (TENSORS, VALUES)}
        if {name: hashlib.sha256(part).hexdigest() for name, part in data.items()} != hashes:
            return None
        values = json.loads(data[VALUES])
        if not isinstance(values, dict):
            return None
        return Checkpoint(step, load_tensors(data[TENSORS]), values)
    except (OSError, ValueError, SafetensorError):
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
