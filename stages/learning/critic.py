"""The critic of an iteration: that of the one before, or a first one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.context import Context
from stages.contracts.lora import LoraParams
from stages.contracts.policy_update import Critic
from stages.contracts.rl import Reward
from stages.engines.models.folders import load_scalar_model, start_scalar_model
from stages.engines.models.lora import open_for_training
from stages.engines.models.unread import Load, to_learn


def load_critic(
    inputs: Mapping[str, Path], start: Critic, reward: str, lora: LoraParams, ctx: Context
) -> Any:
    """The critic of the iteration before, ready to learn; the first starts as `start` says."""
    previous = inputs["state"] / "critic"
    if previous.exists():
        return _open(load_scalar_model, previous, lora, ctx)
    if start is Critic.AUTO:
        start = Critic.REWARD_MODEL if reward == Reward.REWARD_MODEL else Critic.POLICY
    if start is Critic.REWARD_MODEL:
        return _open(load_scalar_model, inputs["reward"], lora, ctx)
    return _open(start_scalar_model, inputs["policy"], lora, ctx)


def _open(load: Load, folder: Path, lora: LoraParams, ctx: Context) -> Any:
    return open_for_training(to_learn(load, ctx), folder, ctx.loads_on, lora, ctx.seed)
