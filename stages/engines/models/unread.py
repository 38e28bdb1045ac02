"""Models whose weights are still in their files, for ranks that each read a part of them.

Always true:
- A weight that is not read yet has its shape and no memory, and says where its numbers are. Memory
  is given to the weights of one unit (spread.py) at a time, and of these a rank keeps its part.
- A part is read by way of float32, as whole models are loaded. No rows are read but those that it
  lies in, and what a rank then holds is compared with them, bit by bit.
- Apart from its numbers, the model is what loading it whole gives.

Files that are arranged in another way than the model, or that have two tensors for one of its
weights, cannot be read by rows, nor can an adapter folder that is merged.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.context import Context, StageError
from stages.engines.models.folders import (
    load_policy,
    load_scalar_model,
    start_scalar_model,
    without_weights,
)
from stages.engines.models.lean_transformers import AutoModelForCausalLM
from stages.engines.models.lora import HEAD, is_adapter_folder
from stages.engines.models.scalar_class import AutoScalarModel
from stages.engines.models.tensor_files import StoredTensor
from stages.engines.models.weights import ModelPart, check_used, compare_tensor, stored_weights

Load = Callable[[Path, str], Any]
"""(folder, device) to a model."""
Stored = Mapping[str, StoredTensor]
_UNREAD = "unread"
"""What a weight that is not read yet has, as an attribute."""


@dataclass(frozen=True)
class Unread:
    """The tensor of a weight in the folder that its model is loaded from."""

    folder: Path
    tensor: StoredTensor

    @torch.no_grad()
    def read_into(self, own: Tensor, start: int) -> None:
        """Fill a part of the weight: a run of its numbers, of which `start` is the first."""
        of_row = self.tensor.shape[1:].numel()
        first, end = start // of_row, -(-(start + own.numel()) // of_row)
        numbers = self.tensor[first:end].float().reshape(-1)
        numbers = numbers[start - first * of_row :][: own.numel()].view(own.shape)
        own.copy_(numbers)
        compare_tensor(self.folder, self.tensor.name, own, numbers)

    def whole(self) -> Tensor:
        return self.tensor.whole().float()


def unread_weights(model: Any) -> dict[str, Unread]:
    """Where the weights of a model are, by their names in it, that are not read yet."""
    return {
        name: getattr(weight, _UNREAD)
        for name, weight in model.named_parameters()
        if hasattr(weight, _UNREAD)
    }


def give_memory(unit: Any) -> None:
    """To the weights of a module that are not read yet; for the moment they are zeros."""
    for weight in unit.parameters():
        if hasattr(weight, _UNREAD):
            weight.data = torch.zeros(weight.shape)


def to_learn(load: Load, ctx: Context) -> Load:
    """How a model is loaded to train it: as ever, or unread where it will be spread over ranks."""
    if ctx.ranks is None or not ctx.sharding.spreads_weights or load not in _BY_ROWS:
        return load
    return partial(_by_rows, load)


def _by_rows(load: Load, folder: Path, device: str) -> Any:
    auto_class, part, options = _BY_ROWS[load]
    outlined = None if is_adapter_folder(folder) else outline(auto_class, folder, part, **options)
    if outlined is None:
        return load(folder, device)
    model, stored = outlined
    if any(stored[name].name != name for name, _ in model.named_parameters() if name in stored):
        return load(folder, device)
    check_used(model, folder, stored, part)
    _take_places(model)
    for name, weight in model.named_parameters():
        unread = Unread(folder, stored[name]) if name in stored else None
        if unread and not name.startswith(f"{HEAD}."):
            setattr(weight, _UNREAD, unread)
            continue
        # A scalar head is small, and copied by adapters: it is there at once.
        weight.data = torch.zeros(weight.shape)
        if unread:
            unread.read_into(weight.data, 0)
    _take_generation_config(model, folder)
    # What transformers notes of files whose tensors it takes as they are.
    model._weight_conversions = []
    return model.eval()


_BY_ROWS: Mapping[Load, tuple[Any, ModelPart, Mapping[str, Any]]] = {
    load_policy: (AutoModelForCausalLM, ModelPart.ALL, {}),
    load_scalar_model: (AutoScalarModel, ModelPart.ALL, {}),
    start_scalar_model: (AutoScalarModel, ModelPart.BACKBONE, {"num_labels": 1}),
}


def outline(
    auto_class: Any, folder: Path, part: ModelPart = ModelPart.ALL, **options: Any
) -> tuple[Any, Stored] | None:
    """The model, of which only what it computes for itself has memory, and where its weights are.

    None where they are not in the files by rows.
    """
    model = without_weights(auto_class, folder, **options)
    stored = stored_weights(folder, model, part)
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if stored is None or stored.keys() - weights or not _compute_buffers(model):
        return None
    if _has_tensors_of_a_tied_weight(model, stored):
        return None
    for name, weight in model.named_parameters():
        if name in stored and weight.shape != stored[name].shape:
            raise StageError(
                f"{folder}: tensor {name} has shape {tuple(stored[name].shape)} in the file and "
                f"{tuple(weight.shape)} in memory"
            )
    return model, stored


def _has_tensors_of_a_tied_weight(model: Any, stored: Stored) -> bool:
    """Whether files have two tensors for a weight that config.json ties.

    Where these differ, transformers does not tie them: only a whole load tells.
    """
    tensors: dict[int, str] = {}
    return any(
        tensors.setdefault(id(weight), stored[name].name) != stored[name].name
        for name, weight in model.named_parameters(remove_duplicate=False)
        if name in stored
    )


def _compute_buffers(model: Any) -> bool:
    """What no file has, such as the frequencies of rotary embeddings, as transformers computes it.

    False where it leaves some as they are, which nobody could then tell from numbers.
    """
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        if not buffers:
            continue
        if any(True for _ in module.parameters(recurse=False)):
            return False
        for name, buffer in buffers.items():
            if not buffer.is_floating_point():
                return False
            setattr(module, name, torch.full_like(buffer, torch.nan, device="cpu"))
        model._init_weights(module)
        if any(bool(buffer.isnan().any()) for buffer in module.buffers(recurse=False)):
            return False
    return True


def _take_places(model: Any) -> None:
    """Let weights without memory be on the CPU, each one number; one in two places stays one."""
    places: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if id(weight) not in places:
                places[id(weight)] = torch.nn.Parameter(torch.zeros(()).expand(weight.shape))
            setattr(module, name, places[id(weight)])


def _take_generation_config(model: Any, folder: Path) -> None:
    """As `from_pretrained` does: it is saved with the weights."""
    if model.can_generate():
        from transformers import GenerationConfig

        stored = (folder / "generation_config.json").is_file()
        how = {} if stored else {"config_file_name": "config.json", "_from_model_config": True}
        model.generation_config = GenerationConfig.from_pretrained(folder, **how)
