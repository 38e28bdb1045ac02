"""How a reward model's folder is read: reward.json holds the rule.

Without a step token the reward is the head's number at the response's last token. With one, it
comes from the probabilities that the response's steps are right: a step ends at each such token and
at the end of the response.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.algorithms.loss import Tokens
from stages.algorithms.reward_loss import step_reward
from stages.contracts.objectives import StepReward
from stages.data.artifacts import write_json
from stages.data.batching import Batch
from stages.engines.forward.scalars import sequence_rewards, token_scores


@dataclass(frozen=True)
class RewardRule:
    """From a scalar at each token to the reward of a response."""

    step_token: int | None = None
    step_reward: StepReward = StepReward.MIN

    @classmethod
    def load(cls, folder: Path) -> "RewardRule":
        rule = json.loads((folder / "reward.json").read_text(encoding="utf-8"))
        return cls(rule["step_token"], StepReward(rule["step_reward"]))

    def save(self, folder: Path) -> None:
        write_json(folder / "reward.json", asdict(self))

    def rewards(self, model: Any, batch: Batch) -> Tensor:
        """[B] the reward of each response."""
        if self.step_token is None:
            return sequence_rewards(model, batch)
        scores = token_scores(model, batch).gather(1, (batch.before + 1).clamp(max=_last(batch)))
        ends = batch.response_ids == self.step_token
        steps = torch.arange(ends.shape[1], device=ends.device)
        ends = ends | (steps == batch.response_mask.sum(1, keepdim=True) - 1)
        return step_reward(
            scores, Tokens.padded(ends & (batch.response_mask > 0)), self.step_reward
        )


def _last(batch: Batch) -> int:
    return batch.ids.shape[1] - 1
