"""How much better an action was than expected. [B, T] tensors run over response tokens."""

import torch
from torch import Tensor


def token_rewards(final: Tensor, penalties: Tensor, mask: Tensor) -> Tensor:
    """[B, T] rewards by token: minus the penalties, and `final` [B] on the last response token."""
    rewards = -penalties * mask
    steps = torch.arange(mask.shape[1], device=mask.device)
    last = (mask * steps).argmax(dim=1)
    rewards[torch.arange(len(final), device=mask.device), last] += final * (mask.sum(1) > 0)
    return rewards


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016): advantages and returns, [B, T].

    The state after the last response token is worth nothing. Masked tokens are not steps: nothing
    decays through them.
    """
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0])
    next_advantage = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        is_step = mask[:, t] > 0
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = torch.where(is_step, advantage, 0.0)
        next_advantage = torch.where(is_step, advantage, next_advantage)
        next_value = torch.where(is_step, values[:, t], next_value)
    return advantages, (advantages + values) * mask


def whiten(values: Tensor, mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Mean 0 and standard deviation 1 over the unmasked; masked entries become 0."""
    count = mask.sum()
    mean = (values * mask).sum() / count
    variance = ((values - mean).square() * mask).sum() / count
    return (values - mean) / (variance.sqrt() + epsilon) * mask


def group_relative(
    rewards: Tensor, groups: Tensor, *, normalise_by_std: bool, epsilon: float = 1e-6
) -> tuple[Tensor, int]:
    """GRPO (Shao et al. 2024): [B] rewards against the mean of their group, [B] group numbers.

    Also the number of groups whose rewards are all equal: they teach nothing.
    """
    num_groups = int(groups.max()) + 1
    counts = torch.zeros(num_groups, dtype=rewards.dtype).index_add(
        0, groups, torch.ones_like(rewards)
    )
    mean = torch.zeros(num_groups, dtype=rewards.dtype).index_add(0, groups, rewards) / counts
    centred = rewards - mean[groups]
    variance = torch.zeros(num_groups, dtype=rewards.dtype).index_add(0, groups, centred**2)
    std = (variance / counts).sqrt()
    num_flat = int((std <= epsilon).sum())
    return (centred / (std[groups] + epsilon) if normalise_by_std else centred), num_flat
