"""Tensors in safetensors files that many ranks write together, each rank some of the files.

Always true:
- Which tensors a file has, and all its bytes, depend on the names, types, shapes and values of the
  tensors alone, never on how many ranks write or how the ranks hold them. A file has the bytes that
  the safetensors library would write.
- A rank has a few tensors in memory beside what it holds: they come one at a time, and are hashed
  and written by threads while the next ones come.
- A rank that cannot write goes on taking its tensors, so that nobody waits for it; then all ranks
  raise its error.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from torch import Tensor

from stages.context import StageError
from stages.data.artifacts import FILE_MODE, write_json
from stages.engines.processes.ranks import ALONE, Ranks

FILE_BYTES = 1_000_000_000
"""The most that a file has, unless a single tensor is larger."""
THREADS = 4
"""Files that one rank writes at a time."""
_AHEAD = 2
"""Tensors that wait for a thread which is busy."""
_TYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors calls them, in the order in which it puts them into a file."""
Fetch = Callable[[str, int], Tensor | None]
"""(name, rank) to the whole tensor on that rank; the others get what they like. All ranks call it,
in the same order."""


@dataclass(frozen=True)
class Form:
    """All about a tensor but its numbers."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Form":
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def natural(name: str) -> list[tuple[int, str, int]]:
    """A key to sort names by, as transformers does: layer 2 comes before layer 10."""
    key: list[tuple[int, str, int]] = []
    for part in name.split("."):
        text = part.rstrip("0123456789")
        key.append((int(bool(text)), text, int(part[len(text) :] or -1)))
    return key


def write_tensor_files(
    folder: Path,
    stem: str,
    forms: Mapping[str, Form],
    fetch: Fetch,
    ranks: Ranks = ALONE,
    *,
    metadata: Mapping[str, str] | None = None,
    index_metadata: Mapping[str, int] | None = None,
    new_hash: Callable[[], Any] = hashlib.sha256,
) -> dict[str, str]:
    """Write `STEM.safetensors`, or several files and their index; the hash of each, on all ranks.

    All ranks call it, and see the same folder. OSError where one of them could not write.
    """
    split = split_state_dict_into_shards_factory(
        {name: forms[name] for name in sorted(forms, key=natural)},
        get_storage_size=lambda form: form.nbytes,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=FILE_BYTES,
    )
    files = {
        name: sorted(held, key=lambda each: (list(_TYPES).index(forms[each].dtype), each))
        for name, held in split.filename_to_tensors.items()
    } or {f"{stem}.safetensors": []}
    hashes: dict[str, str] = {}
    error: OSError | None = None
    names = list(files)
    lanes = ranks.world * THREADS
    for start in range(0, len(names), lanes):
        writers = [
            _Writer(folder / name, _header(files[name], forms, metadata), new_hash())
            if lane % ranks.world == ranks.rank
            else None
            for lane, name in enumerate(names[start : start + lanes])
        ]
        for turn in zip_longest(*(files[name] for name in names[start : start + lanes])):
            for lane, (tensor_name, writer) in enumerate(zip(turn, writers, strict=True)):
                if tensor_name is not None:
                    tensor = fetch(tensor_name, lane % ranks.world)
                    if writer is not None:
                        assert tensor is not None
                        writer.put(tensor.detach())
        for writer in filter(None, writers):
            try:
                hashes[writer.path.name] = writer.close()
            except OSError as own_error:
                error = error or own_error
    if split.is_sharded and not ranks.rank:
        of_all = {**(index_metadata or {}), **split.metadata}
        index = {"metadata": of_all, "weight_map": split.tensor_to_filename}
        try:
            write_json(folder / f"{stem}.safetensors.index.json", index)
        except OSError as own_error:
            error = error or own_error
    of_ranks = ranks.gather((hashes, error and (error.errno, str(error))))
    for _, failed in of_ranks:
        if failed:
            raise error or OSError(*failed)
    everywhere = {name: digest for of_rank, _ in of_ranks for name, digest in of_rank.items()}
    return {name: everywhere[name] for name in names}


def _header(
    names: Sequence[str], forms: Mapping[str, Form], metadata: Mapping[str, str] | None
) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name in names:
        form = forms[name]
        end = start + form.nbytes
        kind = _TYPES[form.dtype]
        header[name] = {"dtype": kind, "shape": list(form.shape), "data_offsets": [start, end]}
        start = end
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


class _Writer:
    """A thread that writes one file and hashes what it writes."""

    def __init__(self, path: Path, header: bytes, digest: Any) -> None:
        self.path = path
        self._digest = digest
        self._error: OSError | None = None
        self._queue: Queue[Tensor | None] = Queue(_AHEAD)
        self._thread = Thread(target=self._write, args=(header,), daemon=True)
        self._thread.start()

    def put(self, tensor: Tensor) -> None:
        # Copied here: whoever lends it may change it once this returns.
        self._queue.put(tensor.cpu() if tensor.is_cuda else tensor)

    def close(self) -> str:
        """The hash of the file, which is on the disk now."""
        self._queue.put(None)
        self._thread.join()
        if self._error:
            raise self._error
        digest: str = self._digest.hexdigest()
        return digest

    def _write(self, header: bytes) -> None:
        tensors = iter(self._queue.get, None)
        try:
            with self.path.open("wb") as file:
                self._add(file, header)
                for tensor in tensors:
                    self._add(file, tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
                file.flush()
                os.fsync(file.fileno())
            self.path.chmod(FILE_MODE)
        except OSError as error:
            self._error = error
            for _ in tensors:
                pass

    def _add(self, file: Any, data: bytes | memoryview) -> None:
        self._digest.update(data)
        file.write(data)


class StoredTensor:
    """A tensor in a file, of which a slice of its rows can be read alone.

    What is read is memory of the file: whoever wants to change it makes a copy.
    """

    def __init__(self, opened: Any, name: str) -> None:
        self.name = name
        self._slice = opened.get_slice(name)
        self.shape = torch.Size(self._slice.get_shape())

    def __getitem__(self, rows: slice) -> Tensor:
        part: Tensor = self._slice[rows]
        return part

    def whole(self) -> Tensor:
        tensor: Tensor = self._slice[...]
        return tensor


def read_whole(tensor: StoredTensor | Tensor) -> Tensor:
    return tensor if isinstance(tensor, Tensor) else tensor.whole()


def tensor_file_names(folder: Path, stem: str) -> list[str]:
    """The files that hold the tensors; of none of them it is known whether it is there."""
    single, index = f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if not index.is_file() or (folder / single).is_file():
        return [single]
    return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))


def stored_tensors(folder: Path, stem: str) -> dict[str, StoredTensor]:
    """All tensors of the files, none of which is read yet."""
    tensors: dict[str, StoredTensor] = {}
    for name in tensor_file_names(folder, stem):
        if not (folder / name).is_file():
            raise StageError(
                f"{folder / name} does not exist: a model's weights are read from safetensors "
                "files alone"
            )
        opened: Any = safe_open(folder / name, framework="pt")  # type: ignore[no-untyped-call]
        tensors |= {each: StoredTensor(opened, each) for each in list(opened.keys())}
    return tensors
