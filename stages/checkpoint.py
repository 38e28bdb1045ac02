"""Resume state in a stage's scratch folder: whole or not there at all.

A checkpoint is a folder `checkpoint-STEP` with tensors, values and a manifest of their hashes. It
is written aside, synced and renamed, so a kill leaves either the old state or the new, and a write
that fails leaves the old one and no stale files. One that fails its hashes, or does not fit who
wants to go on from it, is skipped for the one before it; the last two are kept.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

KEPT = 2
_BLOCK = 1 << 24
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors calls them."""
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
    values = json.dumps(dict(checkpoint.values)).encode()
    for left in scratch.glob(".checkpoint-*.tmp"):
        shutil.rmtree(left, ignore_errors=True)
    try:
        aside.mkdir()
        hashes = {
            TENSORS: _write_synced(aside / TENSORS, _as_safetensors(checkpoint.tensors)),
            VALUES: _write_synced(aside / VALUES, [values]),
        }
        _write_synced(aside / MANIFEST, [json.dumps(hashes).encode()])
        sync_path(aside)
        if final.exists():
            shutil.rmtree(final)
        aside.rename(final)
        sync_path(scratch)
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
        candidate = _read(folder)
        if candidate is not None and fits(candidate):
            return candidate
        print(f"{folder.name} is damaged or not of this training: passed over", flush=True)
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
        if {name: file_hash(folder / name) for name in (TENSORS, VALUES)} != hashes:
            return None
        values = json.loads((folder / VALUES).read_bytes())
        if not isinstance(values, dict):
            return None
        return Checkpoint(step, load_file(folder / TENSORS), values)
    except (FileNotFoundError, NotADirectoryError, ValueError, SafetensorError):
        # An error of the disk is none of these: it may pass, and the checkpoint is worth keeping.
        return None


def _newest_first(scratch: Path) -> list[Path]:
    return sorted(scratch.glob("checkpoint-*"), reverse=True)


def _as_safetensors(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, a tensor at a time: a model is never in memory twice."""
    header, start = {}, 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        shape = list(tensor.shape)
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
        start = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    yield len(encoded).to_bytes(8, "little") + encoded
    for tensor in tensors.values():
        yield tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _write_synced(path: Path, blocks: Iterable[bytes | memoryview]) -> str:
    """Write, and return the hash of what was written."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for block in blocks:
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def sync_path(path: Path) -> None:
    """Bring a file, or a folder's list of files, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
