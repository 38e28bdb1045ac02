"""How a model that learns is spread over the ranks. Execution: results change by rounding only."""

from enum import StrEnum


class Sharding(StrEnum):
    """What each rank holds only its part of; of ZeRO's, each includes the ones before."""

    NONE = "none"
    ZERO1 = "zero1"
    """The optimizer's state: float32 weights and moments."""
    ZERO2 = "zero2"
    """The gradients."""
    ZERO3 = "zero3"
    """The weights that the model computes with."""
    FSDP = "fsdp"
    """All of these, by torch's own FSDP2 instead of DeepSpeed ZeRO."""

    @property
    def spreads_weights(self) -> bool:
        """Whether no rank keeps all weights that the model computes with."""
        return self in (Sharding.ZERO3, Sharding.FSDP)


class Offload(StrEnum):
    """What waits in the host's memory until it is needed."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    """The optimizer's moments; with ZeRO also its float32 weights, and it computes there."""
    ALL = "all"
    """The weights, too; with zero3 or fsdp only. With fsdp the float32 weights, which belong to the
    optimizer's state, are all the weights that a rank holds: the two are the same."""
