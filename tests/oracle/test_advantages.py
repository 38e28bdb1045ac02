"""A group's advantages beside those of TRL's GRPOTrainer."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from stages.algorithms.advantages import group_relative
from tests.oracle.conftest import Record
from tests.oracle.grpo import a_trainer
from tests.oracle.harness import of_values
from tests.oracle.rollouts import GROUP, REWARDS

TRL_EPSILON = 1e-4
"""What TRL adds to a group's standard deviation."""
GROUPS = torch.arange(len(REWARDS)) // GROUP


def trls(folder: Path, scale_rewards: str) -> Tensor:
    trainer = a_trainer(folder, scale_rewards=scale_rewards)
    rows = next(iter(trainer.get_train_dataloader()))
    advantages: Tensor = trainer._generate_and_score_completions(rows)["advantages"]
    return advantages


@pytest.mark.parametrize(("scale_rewards", "normalise"), [("group", True), ("none", False)])
def test_advantages_within_groups(
    tmp_path: Path, equal: Record, scale_rewards: str, normalise: bool
) -> None:
    ours = group_relative(
        torch.tensor(REWARDS), GROUPS, normalise_by_std=normalise, epsilon=TRL_EPSILON
    )
    apart = of_values(ours, trls(tmp_path, scale_rewards))
    equal("advantages", f"GRPO, scale_rewards {scale_rewards}", apart)


def test_the_epsilon_of_a_groups_deviation_is_smaller_here(tmp_path: Path, record: Record) -> None:
    ours = group_relative(torch.tensor(REWARDS), GROUPS, normalise_by_std=True)
    apart = of_values(ours, trls(tmp_path, "group"))
    record("different", "GRPO advantages, each with its own epsilon", apart)
    assert 1e-5 < apart.loss < 1e-3
