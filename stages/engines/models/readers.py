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

from stages.contracts.precision import Precision
from stages.engines.models.lora import is_adapter_folder
from stages.engines.models.precision import DTYPES, is_rounded
from stages.engines.models.spread import first_row, joined_mesh, pass_through_backbone, units_of
from stages.engines.models.unread import Stored, outline
from stages.engines.models.weights import check_rows
from stages.engines.processes.ranks import Ranks

LoadWhole = Callable[[Path, str, Precision], Any]


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
    outlined = None if is_adapter_folder(folder) else outline(auto_class, folder)
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
        own = parameter.to_local()
        first = first_row(len(parameter), ranks.rank, ranks.world)
        # By way of float32, as whole models are loaded.
        own.copy_(stored[name][first : first + len(own)].float())
        rows[name] = (first, own)
    check_rows(model, folder, stored, rows)
