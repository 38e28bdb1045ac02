"""Models that only answer, spread over the ranks that are joined.

Always true:
- A rank holds a run of the rows of each weight, as the model computes with it: rounded. It reads no
  others from the files, and has beside them the weights of one unit (spread.py), so that the model
  is whole nowhere. What it holds is compared with the files, bit by bit.
- The model computes what a whole one computes, on the CPU to the bit.
- All ranks load it together and make the same passes through it.

An adapter folder, or files that are arranged in another way than the model, or that have two
tensors for one of its weights, cannot be read by rows: each rank then loads the whole model on the
host, and keeps its rows.
"""

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from stages.context import StageError
from stages.contracts.precision import Precision
from stages.engines.models.folders import without_weights
from stages.engines.models.lora import is_adapter_folder
from stages.engines.models.precision import DTYPES, is_rounded
from stages.engines.models.spread import first_row, joined_mesh, pass_through_backbone, units_of
from stages.engines.models.tensor_files import StoredTensor
from stages.engines.models.weights import check_rows, stored_weights
from stages.engines.processes.ranks import Ranks

LoadWhole = Callable[[Path, str, Precision], Any]
Stored = Mapping[str, StoredTensor]


def load_spread(
    auto_class: Any,
    load_whole: LoadWhole,
    ranks: Ranks,
    folder: Path,
    device: str,
    precision: Precision,
) -> Any:
    """A model in evaluation mode, a part of it in each rank; all ranks."""
    # Modules of FSDP refer to each other: one that was let go may be in memory still.
    gc.collect()
    outlined = None if is_adapter_folder(folder) else _outline(auto_class, folder)
    model, stored = outlined or (load_whole(folder, "cpu", precision), None)
    model.requires_grad_(False).eval()
    types = _types(model, precision)
    with ranks.exchanging():
        mesh = joined_mesh(device)
        for unit in units_of(model):
            _give_memory(unit, device, types)
            fully_shard(unit, mesh=mesh)
    if stored is not None:
        _read_rows(model, folder, stored, ranks)
    pass_through_backbone(model)
    return model


def _outline(auto_class: Any, folder: Path) -> tuple[Any, Stored] | None:
    """The model, of which only what it computes for itself has memory, and where its weights are.

    None where they are not in the files by rows.
    """
    model = without_weights(auto_class, folder)
    stored = stored_weights(folder, model)
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if stored is None or stored.keys() - weights or not _compute_buffers(model):
        return None
    return None if _has_tensors_of_a_tied_weight(model, stored) else (model, stored)


def _has_tensors_of_a_tied_weight(model: Any, stored: Stored) -> bool:
    """Whether files have two tensors for a weight that config.json ties.

    Where these differ, transformers does not tie them: only a whole load tells.
    """
    tensors: dict[int, str] = {}
    return any(
        tensors.setdefault(id(weight), stored[name].name) != stored[name].name
        for name, weight in model.named_parameters(remove_duplicate=False)
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


def _types(model: Any, precision: Precision) -> dict[int, torch.dtype]:
    """What each weight, by its id, is computed with in."""
    return {
        id(parameter): DTYPES[precision] if is_rounded(model, name, parameter) else parameter.dtype
        for name, parameter in model.named_parameters()
    }


def _give_memory(unit: Any, device: str, types: Mapping[int, torch.dtype]) -> None:
    """To the weights of a unit that have none; one in two places stays one."""
    given: dict[int, torch.nn.Parameter] = {}
    for module in unit.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if not weight.is_meta:
                continue
            if id(weight) not in given:
                empty = torch.empty(weight.shape, dtype=types[id(weight)], device=device)
                given[id(weight)] = torch.nn.Parameter(empty, requires_grad=False)
            setattr(module, name, given[id(weight)])


@torch.no_grad()
def _read_rows(model: Any, folder: Path, stored: Stored, ranks: Ranks) -> None:
    rows: dict[str, tuple[int, Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.shape != stored[name].shape:
            raise StageError(
                f"{folder}: tensor {name} has shape {tuple(stored[name].shape)} in the file and "
                f"{tuple(parameter.shape)} in memory"
            )
        own = parameter.to_local()
        first = first_row(len(parameter), ranks.rank, ranks.world)
        # By way of float32, as whole models are loaded.
        own.copy_(stored[name][first : first + len(own)].float())
        rows[name] = (first, own)
    check_rows(model, folder, stored, rows)
