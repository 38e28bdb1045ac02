"""How a model that learns is spread over the ranks. Execution: results change by rounding only."""

from enum import StrEnum


class Sharding(StrEnum):
    """What each rank holds only its part of (DeepSpeed ZeRO); each includes the ones before."""

    NONE = "none"
    ZERO1 = "zero1"
    """The optimizer's state: float32 weights and moments."""
    ZERO2 = "zero2"
    """The gradients."""
    ZERO3 = "zero3"
    """The weights that the model computes with."""


class Offload(StrEnum):
    """What waits in the host's memory until it is needed."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    """The optimizer's moments; with ZeRO also its float32 weights, and it computes there."""
    ALL = "all"
    """The weights, too; with zero3 only."""
