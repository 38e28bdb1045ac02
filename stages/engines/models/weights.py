"""A loaded model is, tensor by tensor and bit by bit, what its folder holds.

Libraries load what they find: a tensor that is missing from the files is drawn at random, one that
fits nowhere is left out, and neither is an error. Here it is. Every tensor in memory is compared
with its bytes in the safetensors files, cast to the type it has in memory; tensors are read one at
a time, so no second model is ever there. A tied weight may be stored once. Of an adapter folder,
what must be in memory is the base with the adapter added.
"""

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
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
from stages.engines.models.tensor_files import StoredTensor, natural, stored_tensors

STEM = "model"
"""What the files with a model's weights are called."""


class ModelPart(StrEnum):
    """What of a model comes from its folder."""

    ALL = "all"
    BACKBONE = "backbone"
    """All but the head, which is another one, and new."""


def check_weights(model: Any, folder: Path, part: ModelPart = ModelPart.ALL) -> None:
    """StageError names the first tensor that is missing, left over, different or not finite."""
    _compare(_Stored(folder, model), in_files_names(model), model, part)


def stored_weights(
    folder: Path, model: Any, part: ModelPart = ModelPart.ALL
) -> dict[str, StoredTensor] | None:
    """Each tensor of a model's state, such as one without weights, in the model's files.

    None where the files are not arranged as the state is, or lack some of it.
    """
    if is_rearranged(model):
        return None
    stored = stored_tensors(folder, STEM)
    held = model.state_dict(keep_vars=True)
    if part is ModelPart.BACKBONE:
        backbone = f"{model.base_model_prefix}."
        held = {name: tensor for name, tensor in held.items() if name.startswith(backbone)}
    stored_as: dict[str, str] = {}
    for name in held:
        spellings = _spellings(name, f"{model.base_model_prefix}.")
        if spelling := next((each for each in spellings if each in stored), None):
            stored_as[name] = spelling
    for name in held.keys() - stored_as.keys():
        tied = (other for other in stored_as if held[other] is held[name])
        if (other := next(tied, None)) is None:
            return None
        stored_as[name] = stored_as[other]
    return {name: stored[each] for name, each in stored_as.items()}


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
        compare_tensor(stored.folder, name, tensor, stored.read(stored_name, tensor.device))
        checked.add((tensor.data_ptr(), tensor.shape))
    for name in absent:
        if (held[name].data_ptr(), held[name].shape) not in checked:
            raise StageError(
                f"{stored.folder} has no tensor {name}, so what the model has there was made up "
                "at random while it was loaded: save the whole model again"
            )
    if part is ModelPart.BACKBONE:
        left = {name for name in left if name.startswith(backbone)}
    _check_all_used(stored.folder, model, left)


def check_rows(
    model: Any,
    folder: Path,
    stored: Mapping[str, StoredTensor],
    rows: Mapping[str, tuple[int, Tensor]],
) -> None:
    """`check_weights` of a model of which this process holds some rows of each weight.

    `stored` is its `stored_weights`; `rows` has where the rows of a weight begin, and the rows.
    """
    for name, (first, own) in rows.items():
        compare_tensor(folder, name, own, stored[name][first : first + len(own)])
    check_used(model, folder, stored)


def check_used(
    model: Any, folder: Path, stored: Mapping[str, StoredTensor], part: ModelPart = ModelPart.ALL
) -> None:
    """StageError if the files have a tensor that is none of `stored`, as far as the part goes."""
    used = {tensor.name for tensor in stored.values()}
    left = stored_tensors(folder, STEM).keys() - used
    if part is ModelPart.BACKBONE:
        left = {name for name in left if name.startswith(f"{model.base_model_prefix}.")}
    _check_all_used(folder, model, left)


def _check_all_used(folder: Path, model: Any, left: Iterable[str]) -> None:
    left = {name for name in left if not is_computed(model, name)}
    if left:
        raise StageError(
            f"{folder} has a tensor {min(left)} that the model has no place for "
            f"({len(left)} such): config.json describes another model than the weights are of"
        )


def compare_tensor(
    origin: Path | str, name: str, tensor: Tensor, expected: Tensor, holder: str = "the file"
) -> None:
    """StageError if a loaded tensor is not the holder's, cast to its type, or not finite."""
    if tensor.shape != expected.shape:
        raise StageError(
            f"{origin}: tensor {name} has shape {tuple(expected.shape)} in {holder} and "
            f"{tuple(tensor.shape)} in memory"
        )
    if not same_bits(tensor, expected):
        raise StageError(
            f"{origin}: tensor {name} in memory is not what {holder} holds: the model was not "
            "loaded as it was saved"
        )
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        raise StageError(
            f"{origin}: tensor {name} has numbers that are not finite: the training that made "
            "these weights went wrong, or the file is damaged"
        )


def same_bits(tensor: Tensor, expected: Tensor) -> bool:
    """Whether a tensor is the expected one, cast to its type."""
    return torch.equal(_bits(tensor), _bits(expected.to(tensor.device, tensor.dtype)))


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


def stored_names(model: Any) -> list[str]:
    """The tensors of a model's state that its files hold, in their order: a tied one once.

    Also of a model whose weights are spread over ranks.
    """
    state = model.state_dict(keep_vars=True)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    names: dict[int, str] = {}
    for name in sorted(state.keys() - left_out, key=natural):
        known = names.get(id(state[name]))
        if known is None or (known in tied and name not in tied):
            names[id(state[name])] = name
    return sorted(names.values(), key=natural)


def is_rearranged(model: Any) -> bool:
    """Whether the model's files are arranged in another way than its state."""
    return bool(getattr(model, "_weight_conversions", None))


def in_files_names(model: Any) -> dict[str, Tensor]:
    """The model's tensors as they are named, and cut, in its files."""
    state: dict[str, Tensor] = model.state_dict()
    if not is_rearranged(model):
        return state
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, Tensor] = revert_weight_conversion(model, state)
    return converted


class _Stored:
    """The tensors of a folder; with an adapter, those of its base with the adapter added."""

    def __init__(self, folder: Path, model: Any) -> None:
        self.folder = folder
        self._adapter: dict[str, StoredTensor] = {}
        weights = folder
        if is_adapter_folder(folder):
            weights = folder / BASE
            adapter = stored_tensors(folder, WEIGHTS.removesuffix(".safetensors"))
            self._adapter = {name.removeprefix(PREFIX): each for name, each in adapter.items()}
            self._scaling = adapter_scaling(folder)
            self._transposed = conv_layers(model)
        self._base = stored_tensors(weights, STEM)

    def names(self) -> Iterable[str]:
        heads = (name for name in self._adapter if ".lora_" not in name)
        return {*self._base, *heads}

    def read(self, name: str, device: torch.device) -> Tensor:
        """One of them, whole; the device computes what is to be computed."""
        if name in self._adapter:
            return self._adapter[name].whole()
        tensor = self._base[name].whole()
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.weight" not in self._adapter:
            return tensor
        # The base is loaded, and so cast, before the adapter is added to it.
        return with_adapter(
            tensor.float(),
            self._adapter[f"{layer}.lora_A.weight"].whole().to(device),
            self._adapter[f"{layer}.lora_B.weight"].whole().to(device),
            self._scaling,
            transposed=layer in self._transposed,
        )
