"""The clipped policy-gradient loss that PPO and GRPO share. Sums over tokens, never means:

the caller divides by the number of tokens in the whole optimizer step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """The loss summed over tokens, and what it says about the step."""

    loss: Tensor
    approx_kl: Tensor
    """Sum of k3 between the sampling policy and this one."""
    num_clipped_low: Tensor
    num_clipped_high: Tensor
    ratio_min: Tensor
    ratio_max: Tensor


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """PPO's surrogate (Schulman et al. 2017) on [B, T] tensors; masked tokens count for nothing."""
    kept = mask > 0
    log_ratio = torch.where(kept, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    loss = torch.where(kept, losses, 0.0).sum()
    with torch.no_grad():
        return PolicyLoss(
            loss=loss,
            approx_kl=(ratio - 1 - log_ratio).sum(),
            num_clipped_low=(kept & (ratio < 1 - clip_low) & (advantages < 0)).sum(),
            num_clipped_high=(kept & (ratio > 1 + clip_high) & (advantages > 0)).sum(),
            ratio_min=ratio.min(),
            ratio_max=ratio.max(),
        )
