"""Resume state in a stage's scratch folder: whole or not there at all.

A checkpoint is a folder `checkpoint-STEP` with tensors, values and a manifest of their hashes. It
is written aside, synced and renamed, so a kill leaves either the old state or the new, and a write
that fails leaves the old one and no stale files. One that fails its hashes, or does not fit who
wants to go on from it, is skipped for the one before it; the last two are kept.

Where several ranks work, all of them call these functions: each writes, and checks, some of the
files, in the folder that rank 0 sees.

One on a node's own disk (`save_on_node`) is written in its place, and counts once its manifest is
there. Of a job on several nodes each node has some of the files.
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
from torch import Tensor

from stages.context import LocalScratch, StageError
from stages.engines.models.tensor_files import (
    Fetch,
    Form,
    StoredTensor,
    stored_tensors,
    tensor_file_names,
    write_tensor_files,
)
from stages.engines.processes.ranks import ALONE, Ranks

KEPT = 2
_BLOCK = 1 << 24
TENSORS, VALUES, MANIFEST = "tensors", "values.json", "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """What a stage needs to go on after `step`."""

    step: int
    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, Any]
    """JSON."""


def save_checkpoint(
    scratch: Path,
    step: int,
    forms: Mapping[str, Form],
    fetch: Fetch,
    values: Mapping[str, Any],
    ranks: Ranks = ALONE,
) -> None:
    """Write a checkpoint aside and put it in place; what is half written is removed again.

    `fetch` gives the tensors that `forms` names; `values` are JSON, and rank 0's.
    """
    scratch = ranks.same(scratch)
    aside = aside_of(scratch, step)

    def end() -> None:
        hashes[VALUES] = _write_synced(aside / VALUES, json.dumps(dict(values)).encode())
        _write_synced(aside / MANIFEST, json.dumps(hashes).encode())
        put_in_place(scratch, step)

    try:
        ranks.first_does(lambda: begin_aside(scratch, step))
        hashes = write_tensor_files(aside, TENSORS, forms, fetch, ranks)
        ranks.first_does(end)
    except OSError:
        # On a full disk, half a checkpoint only takes room from what can still be written.
        shutil.rmtree(aside, ignore_errors=True)
        raise
    if not ranks.rank:
        drop_the_oldest(scratch)


def begin_aside(scratch: Path, step: int) -> None:
    """An empty folder for a checkpoint to come; what was half written before goes."""
    for left in scratch.glob(".checkpoint-*.tmp"):
        shutil.rmtree(left, ignore_errors=True)
    aside_of(scratch, step).mkdir()


def put_in_place(scratch: Path, step: int) -> None:
    """All files of a checkpoint are aside, and synced: from now on it is there."""
    aside, final = aside_of(scratch, step), checkpoint_of(scratch, step)
    sync_path(aside)
    if final.exists():
        shutil.rmtree(final)
    aside.rename(final)
    sync_path(scratch)


def checkpoint_of(scratch: Path, step: int) -> Path:
    return scratch / f"checkpoint-{step:08d}"


def aside_of(scratch: Path, step: int) -> Path:
    return scratch / f".{checkpoint_of(scratch, step).name}.tmp"


def save_on_node(
    local: LocalScratch,
    step: int,
    forms: Mapping[str, Form],
    fetch: Fetch,
    values: Mapping[str, Any],
    ranks: Ranks = ALONE,
) -> list[str]:
    """Write a checkpoint to the node's own disk; the names of the files that this rank wrote.

    Those before it are removed: whoever calls it has them elsewhere. OSError, on all ranks, where
    one of them could not write; then nothing of it is left.
    """
    folder = local.folder
    final = checkpoint_of(folder, step)

    def begin() -> None:
        folder.mkdir(exist_ok=True)
        shutil.rmtree(final, ignore_errors=True)
        local.make_room(sum(form.nbytes for form in forms.values()) // local.num_nodes)

    def end() -> None:
        hashes[VALUES] = _write_synced(final / VALUES, json.dumps(dict(values)).encode())
        aside = final / f".{MANIFEST}"
        _write_synced(aside, json.dumps(hashes).encode())
        aside.rename(final / MANIFEST)
        sync_path(final)

    try:
        _all_do(begin, ranks)
        _all_do(lambda: final.mkdir(exist_ok=True), ranks)
        hashes = write_tensor_files(final, TENSORS, forms, fetch, ranks)
        own = list(hashes)[ranks.rank :: ranks.world]
        ranks.first_does(end)
    except OSError:
        shutil.rmtree(final, ignore_errors=True)
        raise
    for other in set(_newest_first(folder)) - {final}:
        shutil.rmtree(other, ignore_errors=True)
    return own


def file_names(folder: Path) -> list[str]:
    """All files of a whole checkpoint, the manifest last."""
    names = sorted(each.name for each in folder.iterdir() if not each.name.startswith("."))
    return [*(name for name in names if name != MANIFEST), MANIFEST]


def _all_do(do: Callable[[], object], ranks: Ranks) -> None:
    """What every rank does; OSError on all where one has met one."""
    error: OSError | None = None
    try:
        do()
    except OSError as own_error:
        error = own_error
    for failed in ranks.gather(error and (error.errno, str(error))):
        if failed:
            raise error or OSError(*failed)


def save_tensors(
    scratch: Path, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]
) -> None:
    """A checkpoint of tensors that are here."""
    forms = {name: Form.of(tensor) for name, tensor in tensors.items()}
    save_checkpoint(scratch, step, forms, lambda name, _: tensors[name], values)


def load_checkpoint(
    scratch: Path,
    fits: Callable[[Checkpoint], bool] = lambda _: True,
    ranks: Ranks = ALONE,
    on_node: Path | None = None,
) -> Checkpoint | None:
    """The newest checkpoint that is whole and that fits, by rank 0's opinion, or None.

    Of two of the same step, that `on_node` is read, which is faster.
    """
    scratch = ranks.same(scratch)
    local = list(on_node.glob(f"checkpoint-*/{MANIFEST}")) if on_node else []
    there = [*_newest_first(scratch), *(manifest.parent for manifest in local)]
    there.sort(key=lambda folder: (folder.name, folder.parent == on_node), reverse=True)
    for folder in ranks.same(there):
        # A node whose own disk fails is a node that is lost: what is in the scratch counts.
        checkpoint = _read(folder, ranks, passes_over=folder.parent == on_node)
        if all(ranks.gather(checkpoint is not None)):
            assert checkpoint is not None
            if ranks.same(ranks.rank > 0 or fits(checkpoint)):
                return checkpoint
        if not ranks.rank:
            print(f"{folder.name} is damaged or not of this training: passed over", flush=True)
    return None


def drop_checkpoints_after(scratch: Path, step: int) -> None:
    """Remove those past `step`: broken, or they would have been gone on from."""
    for folder in _newest_first(scratch):
        if folder.name > f"checkpoint-{step:08d}":
            shutil.rmtree(folder, ignore_errors=True)


def drop_the_oldest(scratch: Path) -> None:
    for old in _newest_first(scratch)[KEPT:]:
        shutil.rmtree(old)


def _read(folder: Path, ranks: Ranks, *, passes_over: bool) -> Checkpoint | None:
    """The checkpoint in the folder, if this rank's share of it is as it was written.

    `passes_over`: also where the disk fails.
    """
    try:
        step = int(folder.name.rpartition("-")[2])
        hashes = json.loads((folder / MANIFEST).read_bytes())
        names = [*tensor_file_names(folder, TENSORS), VALUES]
        for name in names[ranks.rank :: ranks.world]:
            if file_hash(folder / name) != hashes[name]:
                return None
        values = json.loads((folder / VALUES).read_bytes())
        if not isinstance(values, dict):
            return None
        return Checkpoint(step, stored_tensors(folder, TENSORS), values)
    except (
        FileNotFoundError,
        NotADirectoryError,
        ValueError,
        KeyError,
        TypeError,
        SafetensorError,
        StageError,
    ):
        # An error of the disk is none of these: it may pass, and the checkpoint is worth keeping.
        return None
    except OSError:
        if passes_over:
            return None
        raise


def _newest_first(scratch: Path) -> list[Path]:
    return sorted(scratch.glob("checkpoint-*"), reverse=True)


def _write_synced(path: Path, data: bytes) -> str:
    """Write, and return the hash of what was written."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()


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
