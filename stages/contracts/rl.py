"""rl: which algorithm, which reward, and the family tree of policies."""

import re
from enum import StrEnum
from typing import Any

from pydantic import Field, field_validator, model_validator

from stages.contracts.base import Section


class Algorithm(StrEnum):
    """How the policy learns from its scored rollouts."""

    PPO = "ppo"
    GRPO = "grpo"


class Reward(StrEnum):
    """Where the reward of a response comes from: the name of its folder under artifacts/rewards."""

    REWARD_MODEL = "reward_model"
    VERIFIER = "verifier"


class Iteration(Section):
    """One iteration of the loop: a node in the family tree of policies."""

    policy: str
    """The policy that this iteration starts from: `sft` or an earlier iteration."""


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class RlParams(Section):
    """The reinforcement-learning loop."""

    algorithm: Algorithm = Field(default=Algorithm.PPO, strict=False)
    """`ppo`: critic, GAE, KL in the reward. `grpo`: group baseline, no critic, KL in the loss."""
    reward: Reward = Field(default=Reward.REWARD_MODEL, strict=False)
    """`reward_model`: the trained reward model. `verifier`: 1 for a right answer, 0 otherwise."""
    iterations: dict[str, Iteration] = Field(
        default_factory=lambda: {
            "iter_001": Iteration(policy="sft"),
            "iter_002": Iteration(policy="iter_001"),
            "iter_003": Iteration(policy="iter_002"),
        }
    )
    """Name of each iteration, and the policy it starts from; add a line to run one more."""

    @field_validator("iterations", mode="before")
    @classmethod
    def _names_are_words(cls, value: Any) -> Any:
        for name in value if isinstance(value, dict) else ():
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} is not a name (a letter, then letters, digits and underscores), and "
                    "DVC would silently drop it: call it iter_001, iter_002, ..."
                )
        return value

    @model_validator(mode="after")
    def _is_a_tree(self) -> "RlParams":
        if not self.iterations:
            raise ValueError("iterations is empty: name at least one, iter_001: {policy: sft}")
        known = {"sft"}
        for name, iteration in self.iterations.items():
            if name == "sft":
                raise ValueError("'sft' is the supervised policy; give the iteration another name")
            if iteration.policy not in known:
                raise ValueError(
                    f"{name} starts from {iteration.policy!r}, which is neither 'sft' nor an "
                    "iteration above it"
                )
            known.add(name)
        return self
