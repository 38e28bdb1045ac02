"""The reward of an episode, shared out over its turns, where `rl.turn_credit` is `turn`.

A turn gets what the environment paid for it, times the weight of that source; the last turn gets
all else besides: other sources, and penalties for how the episode ended. The shares add up to the
reward, but for rounding.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from stages.context import StageError
from stages.contracts.rewards import AnySource, Paid
from stages.data.finite import sample_name
from stages.data.schema import RolloutRow


def environment_weight(weights: Mapping[str, float], named: Mapping[str, AnySource]) -> float:
    """By how much the environment's reward counts."""
    return sum(weight for name, weight in weights.items() if isinstance(named.get(name), Paid))


def reward_by_turn(
    rollouts: Sequence[RolloutRow], rewards: Tensor, weight: float
) -> list[list[float]]:
    """Shares of the `rewards` [N] in float64, as many per row as it has turns."""
    return [
        _shares(row, reward, weight) for row, reward in zip(rollouts, rewards.tolist(), strict=True)
    ]


def _shares(row: RolloutRow, reward: float, weight: float) -> list[float]:
    paid, total = row.get("turn_rewards"), row["environment_reward"]
    if not paid or total is None:
        raise StageError(
            f"rl.turn_credit is turn, but {sample_name(row)} has no turns that an environment paid "
            "for: set rollout.environment, and roll out again"
        )
    shares = [weight * each for each in paid]
    shares[-1] += reward - weight * total
    return shares
