"""Params that every training stage shares."""

from enum import StrEnum

from pydantic import Field

from stages.contracts.base import Section


class Schedule(StrEnum):
    """How the learning rate goes on after its warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class OptimizerParams(Section):
    """AdamW with a linear warm-up and a cosine decay to a tenth."""

    learning_rate: float = Field(gt=0)
    """Peak learning rate."""
    epochs: int = Field(ge=1)
    """Passes over the stage's data."""
    batch_size: int = Field(ge=1)
    """Sequences (for preferences: pairs) in one optimizer step, over all ranks."""
    warmup_ratio: float = Field(default=0.05, ge=0, le=1)
    """Share of the steps over which the learning rate rises from zero."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    decay_norms_and_biases: bool = False
    """Whether norms and biases decay like other weights; transformers and TRL spare them."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay of the mean of gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's decay of the mean of squared gradients."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """What AdamW adds to the root of the mean of squared gradients before it divides by it."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    ema_decay: float = Field(default=0.0, ge=0, lt=1)
    """Decay of a moving average of the weights, which is then what is saved; 0: no average."""
