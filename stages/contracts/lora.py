"""LoRA (Hu et al. 2021): a small adapter learns beside weights that stay as they are. No torch."""

from enum import StrEnum

from pydantic import Field

from stages.contracts.base import Section


class LoraSave(StrEnum):
    """What a stage that trained an adapter leaves behind."""

    MERGED = "merged"
    """The weights with the adapter added: an ordinary model folder."""
    ADAPTER = "adapter"
    """The adapter beside its base; the next iteration goes on with it."""


class LoraParams(Section):
    """Which weights learn: all of them, or an adapter of low rank beside each linear layer."""

    rank: int = Field(default=0, ge=0)
    """Rank of the adapter's matrices; 0: no adapter, all weights are trained."""
    alpha: float = Field(default=32.0, gt=0)
    """LoRA's alpha: the adapter's output is scaled by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of the adapter's inputs in training (SFT and reward model)."""
    targets: list[str] = Field(default=[])
    """Names of the linear layers with an adapter; empty: all but the head."""
    save: LoraSave = Field(default=LoraSave.MERGED, strict=False)
    """Whether to save merged weights or the adapter beside its base."""


ALL_WEIGHTS = LoraParams()
"""No adapter."""
