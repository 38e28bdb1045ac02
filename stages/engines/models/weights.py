"""A loaded model is, tensor by tensor and bit by bit, what its folder holds.

Libraries load what they find: a tensor that is missing from the files is drawn at random, one that
fits nowhere is left out, and neither is an error. Here it is. Every tensor in memory is compared
with its bytes in the safetensors files, cast to the type it has in memory; tensors are read one at
a time, so no second model is ever there. A tied weight may be stored once. Of an adapter folder,
what must be in memory is the base with the adapter added.
"""

import json
import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from stages.context import StageError
from stages.engines.models.lora import (
    BASE,
    PREFIX,
    WEIGHTS,
    adapter_scaling,
    conv_layers,
    is_adapter_folder,
    with_adapter,
)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class ModelPart(StrEnum):
    """What of a model comes from its folder."""

    ALL = "all"
    BACKBONE = "backbone"
    """All but the head, which is another one, and new."""


def check_weights(model: Any, folder: Path, part: ModelPart = ModelPart.ALL) -> None:
    """StageError names the first tensor that is missing, left over, different or not finite."""
    with ExitStack() as files:
        stored = _Stored(files, folder, model)
        _compare(stored, _in_files_names(model), model, part)


def stored_weights(
    files: ExitStack, folder: Path, model: Any
) -> dict[str, Callable[[], Tensor]] | None:
    """How to read each tensor of a model's state, such as one without weights, from its files.

    None where the files are not arranged as the state is, or lack some of it.
    """
    if getattr(model, "_weight_conversions", None):
        return None
    opened = open_tensors(files, folder)
    held = model.state_dict(keep_vars=True)
    stored_as: dict[str, str] = {}
    for name in held:
        spellings = _spellings(name, f"{model.base_model_prefix}.")
        if spelling := next((each for each in spellings if each in opened), None):
            stored_as[name] = spelling
    for name in held.keys() - stored_as.keys():
        tied = (other for other in stored_as if held[other] is held[name])
        if (other := next(tied, None)) is None:
            return None
        stored_as[name] = stored_as[other]
    return {name: partial(opened[each].get_tensor, each) for name, each in stored_as.items()}


def _compare(stored: "_Stored", held: dict[str, Tensor], model: Any, part: ModelPart) -> None:
    backbone = f"{model.base_model_prefix}."
    checked: set[tuple[int, torch.Size]] = set()
    absent: list[str] = []
    left = set(stored.names())
    for name, tensor in held.items():
        if part is ModelPart.BACKBONE and not name.startswith(backbone):
            continue
        stored_name = next((n for n in _spellings(name, backbone) if n in left), None)
        if stored_name is None:
            absent.append(name)
            continue
        left.remove(stored_name)
        compare_tensor(stored.folder, name, tensor, stored.read(stored_name))
        checked.add((tensor.data_ptr(), tensor.shape))
    for name in absent:
        if (held[name].data_ptr(), held[name].shape) not in checked:
            raise StageError(
                f"{stored.folder} has no tensor {name}, so what the model has there was made up "
                "at random while it was loaded: save the whole model again"
            )
    if part is ModelPart.BACKBONE:
        left = {name for name in left if name.startswith(backbone)}
    left = {name for name in left if not is_computed(model, name)}
    if left:
        raise StageError(
            f"{stored.folder} has a tensor {min(left)} that the model has no place for "
            f"({len(left)} such): config.json describes another model than the weights are of"
        )


def compare_tensor(folder: Path, name: str, tensor: Tensor, expected: Tensor) -> None:
    """StageError if a tensor in memory is not the file's, cast to its type, or not finite."""
    if tensor.shape != expected.shape:
        raise StageError(
            f"{folder}: tensor {name} has shape {tuple(expected.shape)} in the file and "
            f"{tuple(tensor.shape)} in memory"
        )
    if not torch.equal(_bits(tensor), _bits(expected.to(tensor.device, tensor.dtype))):
        raise StageError(
            f"{folder}: tensor {name} in memory is not what the file holds: the model was not "
            "loaded as it was saved"
        )
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        raise StageError(
            f"{folder}: tensor {name} has numbers that are not finite: the training that made "
            "these weights went wrong, or the file is damaged"
        )


def is_computed(model: Any, name: str) -> bool:
    """Whether older versions of a library stored what this one computes from the config."""
    known = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    patterns = [*known, r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"]
    return any(re.search(pattern, name) for pattern in patterns)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _spellings(name: str, backbone: str) -> Iterable[str]:
    """A model's backbone may be saved alone, without the prefix that it has under a head."""
    return (name, name.removeprefix(backbone), backbone + name)


def _in_files_names(model: Any) -> dict[str, Tensor]:
    """The model's tensors as they are named, and cut, in its files."""
    state: dict[str, Tensor] = model.state_dict()
    if not getattr(model, "_weight_conversions", None):
        return state
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, Tensor] = revert_weight_conversion(model, state)
    return converted


class _Stored:
    """The tensors of a folder; with an adapter, those of its base with the adapter added."""

    def __init__(self, files: ExitStack, folder: Path, model: Any) -> None:
        self.folder = folder
        self._adapter: dict[str, Any] = {}
        weights = folder
        if is_adapter_folder(folder):
            weights = folder / BASE
            adapter = _opened(files, folder / WEIGHTS)
            self._adapter = {name.removeprefix(PREFIX): adapter for name in _names(adapter)}
            self._scaling = adapter_scaling(folder)
            self._transposed = conv_layers(model)
        self._base = open_tensors(files, weights)

    def names(self) -> Iterable[str]:
        heads = (name for name in self._adapter if ".lora_" not in name)
        return {*self._base, *heads}

    def read(self, name: str) -> Tensor:
        if name in self._adapter:
            return self._of_adapter(name)
        tensor: Tensor = self._base[name].get_tensor(name)
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.weight" not in self._adapter:
            return tensor
        # The base is loaded, and so cast, before the adapter is added to it.
        return with_adapter(
            tensor.float(),
            self._of_adapter(f"{layer}.lora_A.weight"),
            self._of_adapter(f"{layer}.lora_B.weight"),
            self._scaling,
            transposed=layer in self._transposed,
        )

    def _of_adapter(self, name: str) -> Tensor:
        tensor: Tensor = self._adapter[name].get_tensor(PREFIX + name)
        return tensor


def open_tensors(files: ExitStack, folder: Path) -> dict[str, Any]:
    """The names of a folder's tensors, each with the opened file that has it."""
    shards = [SINGLE]
    if (folder / INDEX).is_file() and not (folder / SINGLE).is_file():
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        shards = sorted(set(index["weight_map"].values()))
    opened = [_opened(files, folder / name) for name in shards]
    return {name: file for file in opened for name in _names(file)}


def _names(opened: Any) -> list[str]:
    return list(opened.keys())


def _opened(files: ExitStack, path: Path) -> Any:
    if not path.is_file():
        raise StageError(
            f"{path} does not exist: a model's weights are read from safetensors files alone"
        )
    return files.enter_context(safe_open(path, framework="pt"))  # type: ignore[no-untyped-call]
