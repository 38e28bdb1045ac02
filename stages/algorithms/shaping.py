"""Reward shaping: what happens to rewards before advantages are computed. Tensors are [N]."""

from collections.abc import Mapping

import torch
from torch import Tensor


def combine(by_source: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """The weighted sum of rewards from several sources, in the order of `weights`."""
    if not weights or by_source.keys() != weights.keys():
        raise ValueError(
            f"rewards come from {sorted(by_source)} and weights are for {sorted(weights)}: "
            "give each source one weight"
        )
    return torch.stack([weight * by_source[name] for name, weight in weights.items()]).sum(0)


def clip_rewards(rewards: Tensor, limit: float) -> Tensor:
    """Rewards clipped to plus or minus `limit`."""
    return rewards.clamp(-limit, limit)


def whiten_rewards(rewards: Tensor, sampled: Tensor | None = None) -> Tensor:
    """Mean 0 and standard deviation 1 over the sampled responses; 0 where they are all equal.

    Responses that are only compared with move along with them.
    """
    kept = (rewards if sampled is None else rewards[sampled]).double()
    if kept.min() == kept.max():
        return rewards - kept[0].to(rewards.dtype)
    return ((rewards.double() - kept.mean()) / kept.std(correction=0)).to(rewards.dtype)


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int, penalty: float) -> Tensor:
    """DAPO's soft overlong punishment (Yu et al. 2025), to be added to the reward.

    0 up to max_length - buffer, then linearly down to -penalty at max_length. No buffer, no
    penalty.
    """
    excess = (lengths - (max_length - buffer)).clamp(0, buffer)
    return penalty * -excess / max(buffer, 1)


def missing_eos(ended: Tensor, penalty: float) -> Tensor:
    """-penalty for each truncated response, to be added to the reward."""
    return torch.where(ended, 0.0, -penalty)
