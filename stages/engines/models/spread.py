"""How a model is spread over the ranks by torch's FSDP2, for those that learn and those that read.

A model is cut into units: its layers, its input embedding, and all that is left. A rank holds a run
of the rows of each weight. The weights of a unit are gathered together before it computes, and
dropped afterwards; those of the last unit, the output head's among them, stay, so that a rank may
call the head as often as it likes. As a pass gathers weights, all ranks make the same passes.
"""

from collections.abc import Sequence
from typing import Any

from stages.engines.models.lora import unwrapped

SPREAD_PASS = "pass_through_backbone"
"""The method of a model that is spread over ranks, where it has one, that runs its backbone."""


def decoder_layers(plain: Any) -> list[Any]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [m for m in plain.base_model.modules() if isinstance(m, GradientCheckpointingLayer)]


def units_of(model: Any, apart: Sequence[Any] = ()) -> list[Any]:
    """Modules whose weights are gathered together, inner ones first; those `apart` are their own.

    An embedding that is the head, too, belongs to what is left.
    """
    plain = unwrapped(model)
    units = dict.fromkeys([*apart, *decoder_layers(plain)])
    embedding, head = plain.get_input_embeddings(), plain.get_output_embeddings()
    if head is None or head.weight is not embedding.weight:
        units |= {embedding: None}
    return [*units, plain]


def joined_mesh(device: str) -> Any:
    """All ranks, by the group that was joined: a new one would, on GPUs, meet by NCCL always."""
    from torch.distributed import group
    from torch.distributed.device_mesh import DeviceMesh

    assert group.WORLD is not None
    return DeviceMesh.from_group(group.WORLD, device.partition(":")[0])


def pass_through_backbone(model: Any) -> None:
    """Let a model that is spread be called without its head.

    A pass calls the backbone alone: to FSDP, that is to be a pass through the whole model. It drops
    no weight of the outermost module at its end: the head's are among them.
    """
    from torch.distributed.fsdp import register_fsdp_forward_method

    plain = unwrapped(model)
    if plain.base_model is not plain:
        setattr(plain, SPREAD_PASS, plain.base_model.__call__)
        register_fsdp_forward_method(plain, SPREAD_PASS)


def first_row(num_rows: int, rank: int, world: int) -> int:
    """Where a rank's rows of a weight start; the last ranks may have fewer, or none."""
    return min(rank * -(-num_rows // world), num_rows)
