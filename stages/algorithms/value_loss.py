"""The critic's loss, summed over tokens."""

import torch
from torch import Tensor


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float
) -> Tensor:
    """Half the squared error: the worse of the value and of one kept within `clip` of the old."""
    near = old_values + (values - old_values).clamp(-clip, clip)
    error = torch.maximum((values - returns).square(), (near - returns).square())
    return torch.where(mask > 0, 0.5 * error, 0.0).sum()


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 where the values predict the returns exactly, 0 where they say no more than a constant."""
    kept = mask > 0
    returns, errors = returns[kept], (returns - values)[kept]
    spread = float(returns.var(correction=0))
    return 1 - float(errors.var(correction=0)) / spread if spread > 0 else 0.0
