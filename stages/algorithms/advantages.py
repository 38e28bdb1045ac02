"""Advantages: how much better an action was than expected.

[B, T] tensors run over response tokens. Tokens that are masked (padding, and what a tool said
between two turns) are not actions: they are paid nothing, nothing decays through them, and what
stands there is never looked at. [N] tensors hold one value per response; `groups` [N] says
which responses answer the same prompt, by any integers in any order.

REINFORCE takes the discounted return itself for an advantage. REINFORCE++ (Hu et al. 2025) whitens
it over the batch, with the KL penalty in the token rewards; its baseline variant puts
`group_centred` rewards into `token_rewards`.
"""

import torch
from torch import Tensor

from stages.algorithms.groups import zero_variance

Discount = float | Tensor
"""Of what follows an action: one for all, or [B, T] one after each token."""


def token_rewards(final: Tensor, penalties: Tensor, mask: Tensor) -> Tensor:
    """[B, T] rewards by token: minus the penalties, and `final` [B] on the last action token.

    A response with no action token is paid nothing.
    """
    kept = mask > 0
    is_last = kept & (kept.flip(1).cumsum(1).flip(1) == 1)
    return torch.where(kept, -penalties, 0.0) + torch.where(is_last, final[:, None], 0.0)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: Discount, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016): advantages and returns, [B, T].

    The state after the last action token is worth nothing.
    """
    kept = mask > 0
    advantages = torch.zeros_like(values)
    next_value = values.new_zeros(len(values))
    next_advantage = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        discount = _after(gamma, t)
        delta = rewards[:, t] + discount * next_value - values[:, t]
        advantage = delta + discount * lam * next_advantage
        next_advantage = torch.where(kept[:, t], advantage, next_advantage)
        next_value = torch.where(kept[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(kept[:, t], advantage, 0.0)
    return advantages, torch.where(kept, advantages + values, 0.0)


def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: Discount) -> Tensor:
    """[B, T] what each action token and those after it are paid, discounted by action."""
    kept = mask > 0
    returns = torch.zeros_like(rewards)
    following = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        worth = rewards[:, t] + _after(gamma, t) * following
        following = torch.where(kept[:, t], worth, following)
        returns[:, t] = torch.where(kept[:, t], following, 0.0)
    return returns


def _after(gamma: Discount, t: int) -> Discount:
    return gamma[:, t] if isinstance(gamma, Tensor) else gamma


def whiten(values: Tensor, mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Mean 0 and standard deviation 1 over the unmasked; masked entries become 0.

    Values that are all equal, or one alone, become 0.
    """
    kept = values[mask > 0].double()
    white = torch.zeros_like(values)
    if len(kept) and kept.min() != kept.max():
        scaled = (kept - kept.mean()) / (kept.std(correction=0) + epsilon)
        white[mask > 0] = scaled.to(values.dtype)
    return white


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, *, gamma: Discount) -> Tensor:
    """REINFORCE++ (Hu et al. 2025) from token rewards [B, T] of the whole rollout batch."""
    return whiten(discounted_returns(rewards, mask, gamma=gamma), mask)


def group_centred(rewards: Tensor, groups: Tensor) -> Tensor:
    """[N] rewards against the mean of their group."""
    return _centred(rewards, groups).to(rewards.dtype)


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """RLOO (Ahmadian et al. 2024): [N] rewards against the mean of the others in their group."""
    return _against_the_others(rewards, groups).to(rewards.dtype)


def against_baseline(rewards: Tensor, baselines: Tensor) -> Tensor:
    """ReMax (Li et al. 2024): [N] rewards against those of the prompts' greedy responses."""
    return rewards - baselines


def group_relative(
    rewards: Tensor,
    groups: Tensor,
    *,
    normalise_by_std: bool,
    leave_one_out: bool = False,
    epsilon: float = 1e-6,
) -> Tensor:
    """GRPO (Shao et al. 2024): [N] rewards against the mean of their group, over its deviation.

    With `leave_one_out` mean and deviation are those of the group's other members. Where these are
    all equal, or only one, there is nothing to divide by and the difference is kept as it is.
    """
    difference = (_against_the_others if leave_one_out else _centred)(rewards, groups)
    if normalise_by_std:
        std = (_std_of_the_others if leave_one_out else _std)(rewards, groups)
        difference = torch.where(std > 0, difference / (std + epsilon), difference)
    return difference.to(rewards.dtype)


def _centred(rewards: Tensor, groups: Tensor) -> Tensor:
    total, count = _over_group(rewards.double(), groups)
    return torch.where(zero_variance(rewards, groups), 0.0, rewards.double() - total / count)


def _against_the_others(rewards: Tensor, groups: Tensor) -> Tensor:
    total, count = _over_group(rewards.double(), groups)
    others = (total - rewards.double()) / (count - 1).clamp(min=1)
    return torch.where(zero_variance(rewards, groups), 0.0, rewards.double() - others)


def _std(rewards: Tensor, groups: Tensor) -> Tensor:
    squares, count = _over_group(_centred(rewards, groups).square(), groups)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def _std_of_the_others(rewards: Tensor, groups: Tensor) -> Tensor:
    # Not from running sums: where the others are all equal, rounding would leave a tiny deviation
    # to divide by.
    std = torch.zeros_like(rewards, dtype=torch.float64)
    for group in torch.unique(groups):
        rows = (groups == group).nonzero().flatten()
        if len(rows) < 3:
            continue
        others = ~torch.eye(len(rows), dtype=torch.bool, device=rewards.device)
        table = rewards[rows].double().expand(len(rows), -1)[others].reshape(len(rows), -1)
        std[rows] = table.std(1, correction=1)
    return std


def _over_group(values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """[N] the sum and [N] the number of values in each row's group."""
    ids, index = torch.unique(groups, return_inverse=True)
    sums = values.new_zeros(len(ids)).index_add(0, index, values)
    counts = values.new_zeros(len(ids)).index_add(0, index, torch.ones_like(values))
    return sums[index], counts[index]
