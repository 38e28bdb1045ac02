"""The value loss, and the critic's explained variance."""

import torch
from torch import Tensor

from stages.algorithms.loss import Counts, Loss, MetricPart, Per, Tokens


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    tokens: Tokens,
    counts: Counts,
    *,
    clip: float | None,
) -> Loss:
    """Half the squared error, averaged over tokens.

    With `clip` (Schulman et al. 2017's code), the worse of that and of the error of a value kept
    within `clip` of the old one.
    """
    values, old_values, returns = (tokens.keep(tensor) for tensor in (values, old_values, returns))
    errors = (values - returns).square()
    held = torch.zeros_like(values)
    if clip is not None:
        near = values.clamp(old_values - clip, old_values + clip)
        near_errors = (near - returns).square()
        held = (near_errors > errors).to(values)
        errors = torch.maximum(errors, near_errors)
    value = tokens.total(0.5 * errors) / counts.tokens
    metrics = {
        "value_loss": MetricPart(value.detach(), Per.STEP),
        "value_clip_fraction": MetricPart(tokens.total(held), Per.TOKEN),
    }
    return Loss(value, metrics)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 where the values predict the returns exactly, 0 where they say no more than a constant."""
    kept = mask > 0
    if not kept.any():
        return 0.0
    actual = returns[kept].double()
    spread = float(actual.var(correction=0))
    errors = float((actual - values[kept].double()).var(correction=0))
    return 1 - errors / spread if spread else 0.0
