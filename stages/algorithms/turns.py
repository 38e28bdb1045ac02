"""Credit over turns: rewards that are paid at any turn of an episode, and what each turn is worth.

[B, T] tensors run over response tokens, [B, K] over turns, padded on the right. `ends` [B, T] is 1
at the last token of each turn, where the turn is paid, and 0 elsewhere; such a token is always one
of the policy's own. Turn t of episode i is worth its return

    G[i, t] = sum over k >= t of discount ** (k - t) * r[i, k]

and is compared with turn t of the other episodes of its group: an episode that was over before has
no turn t, and counts neither in its mean nor in its deviation. Such a baseline does not depend on
what is done from turn t on. Normalised rewards of turns that are then summed (Shao et al. 2024,
process supervision; Zeng et al. 2025) are another thing: of their baseline as many terms are
subtracted as the episode has turns left, which pays the policy for ending early or late.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def turn_numbers(ends: Tensor) -> Tensor:
    """[B, T] the turn that each token belongs to, from 0; an observation is the next turn's."""
    return (ends.cumsum(1) - ends).long()


def turn_rewards(rewards: Tensor, ends: Tensor) -> Tensor:
    """[B, K] what the tokens of each turn are paid together."""
    turns = turn_numbers(ends)
    num_turns = int(ends.sum(1).max()) if len(ends) else 0
    # After the last end there are no own tokens, so nothing is paid there.
    by_turn = rewards.new_zeros(len(rewards), num_turns + 1).scatter_add(1, turns, rewards)
    return by_turn[:, :num_turns]


def turn_returns(rewards: Tensor, *, discount: float) -> Tensor:
    """[B, K] what each turn and those after it are paid, discounted by turn."""
    returns = torch.zeros_like(rewards)
    following = rewards.new_zeros(len(rewards))
    for turn in reversed(range(rewards.shape[1])):
        following = rewards[:, turn] + discount * following
        returns[:, turn] = following
    return returns


def compared_by_turn(
    returns: Tensor, ends: Tensor, groups: Tensor, compare: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """[B, K] advantages of turns: `compare` sees the returns of all turns there are, one after
    another, and a number for each group and turn."""
    num_turns = returns.shape[1]
    turns = torch.arange(num_turns, device=returns.device)
    there = turns < ends.sum(1)[:, None]
    _, group = torch.unique(groups.to(returns.device), return_inverse=True)
    group_and_turn = group[:, None] * num_turns + turns
    advantages = torch.zeros_like(returns)
    advantages[there] = compare(returns[there], group_and_turn[there])
    return advantages


def over_tokens(of_turns: Tensor, ends: Tensor, mask: Tensor) -> Tensor:
    """[B, T] each turn's value at all of its own tokens."""
    turns = turn_numbers(ends).clamp(max=of_turns.shape[1] - 1)
    return of_turns.gather(1, turns) * mask


def discounts(ends: Tensor, *, gamma: float, turn_discount: float) -> Tensor:
    """[B, T] the discount of what follows each token: by token, and again where a turn ends."""
    return torch.where(ends > 0, gamma * turn_discount, gamma).to(ends.dtype)
