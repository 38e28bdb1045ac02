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
    """Warm-up: share of the steps over which the learning rate rises from zero."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    decay_norms_and_biases: bool = False
    """Whether norms and biases decay like other weights; transformers and TRL spare them."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's beta1: decay of the mean of gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's beta2: decay of the mean of squared gradients."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon, added to the denominator."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient clipping: largest norm of all gradients together."""
    ema_decay: float = Field(default=0.0, ge=0, lt=1)
    """Decay of a moving average (EMA) of the weights, which is saved instead; 0: no average."""
