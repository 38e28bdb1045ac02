"""Which of the policy's tokens a reward is paid to: the last one, or the last one of each turn.

By turn where the scores have `reward_by_turn`, which they have with `rl.turn_credit: turn`. KL
penalties are paid by each token in both cases. All tensors are [N, T], as in experience.py.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from stages.algorithms.advantages import Discount, token_rewards
from stages.algorithms.turns import (
    compared_by_turn,
    discounts,
    over_tokens,
    turn_returns,
    turn_rewards,
)
from stages.contracts.policy_update import PolicyUpdateConfig
from stages.learning.update import Rollouts


def is_by_turn(rollouts: Rollouts) -> bool:
    """Whether each turn has a reward of its own."""
    return rollouts[0].get("reward_by_turn") is not None


def rewards_by_token(rollouts: Rollouts, penalties: Tensor, mask: Tensor) -> Tensor:
    """What each token is paid, minus its penalty."""
    final = torch.tensor([row["reward"] for row in rollouts])
    if not is_by_turn(rollouts):
        return token_rewards(final, penalties, mask)
    paid = token_rewards(torch.zeros_like(final), penalties, mask)
    for index, row in enumerate(rollouts):
        of_turns = torch.tensor(row["reward_by_turn"], dtype=paid.dtype)
        paid[index, list(row["turn_ends"])] += of_turns
    return paid


def discount_of(config: PolicyUpdateConfig, rollouts: Rollouts, mask: Tensor) -> Discount:
    """Of what follows a token; by `rl.turn_discount` too, where it is a turn's last."""
    gamma = config.policy_update.gamma
    if not is_by_turn(rollouts):
        return gamma
    return discounts(_ends(rollouts, mask), gamma=gamma, turn_discount=config.turn_discount)


def advantages_of_turns(
    config: PolicyUpdateConfig,
    rollouts: Rollouts,
    penalties: Tensor,
    mask: Tensor,
    groups: Tensor,
    compare: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Advantages of a method that compares within groups, of each turn at all of its tokens."""
    ends = _ends(rollouts, mask)
    of_turns = turn_rewards(rewards_by_token(rollouts, penalties, mask), ends)
    returns = turn_returns(of_turns, discount=config.turn_discount)
    return over_tokens(compared_by_turn(returns, ends, groups, compare), ends, mask)


def _ends(rollouts: Rollouts, mask: Tensor) -> Tensor:
    """1 at the last token of each turn."""
    ends = torch.zeros_like(mask)
    for index, row in enumerate(rollouts):
        ends[index, list(row["turn_ends"])] = 1.0
    assert not (ends * (1 - mask)).any(), "a turn ends with one of the policy's own tokens"
    return ends
