"""RLOO's advantages and gradient beside TRL's RLOOTrainer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.algorithms.advantages import leave_one_out
from stages.algorithms.kl import k1
from stages.algorithms.loss import LossAggregation
from stages.algorithms.policy_loss import Objective, policy_loss
from stages.contracts.objectives import Aggregation, PolicyObjective
from tests.oracle.conftest import Record
from tests.oracle.harness import difference, of_values
from tests.oracle.rollouts import (
    GROUP,
    LENGTHS,
    MAX_LENGTH,
    PROMPTS,
    REWARDS,
    Responses,
    responses,
    sampling_policy,
)
from tests.oracle.trainers import a_trainer, settings, trl

REINFORCE = Objective(
    PolicyObjective.GRADIENT,
    clip_low=0.2,
    clip_high=0.2,
    dual_clip=None,
    aggregation=LossAggregation(Aggregation.SEQUENCE_MEAN_TOKEN_SUM),
)


def sampled(folder: Path, kl_coef: float) -> tuple[Any, dict[str, Tensor]]:
    """The trainer and its batch of our responses, scored."""
    args = trl.RLOOConfig(
        **settings(folder, len(LENGTHS)),
        num_generations=GROUP,
        max_completion_length=MAX_LENGTH,
        beta=kl_coef,
    )
    model = sampling_policy(folder / "reference")
    trainer = a_trainer(trl.RLOOTrainer, model, args, PROMPTS, reward_funcs=lambda **_: REWARDS)
    trainer._generate_single_turn = lambda *_: responses()
    rows = next(iter(trainer.get_train_dataloader()))
    return trainer, trainer._generate_and_score_completions(rows)


@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
def test_advantages_against_the_others(tmp_path: Path, equal: Record, kl_coef: float) -> None:
    """TRL takes the summed k1 off the reward before it compares."""
    trainer, batch = sampled(tmp_path, kl_coef)
    row = Responses.of(batch)
    rewards = torch.tensor(REWARDS)
    if kl_coef:
        with torch.no_grad():
            kl = k1(row.logprobs(trainer.model), row.logprobs(trainer.ref_model))
        rewards = rewards - kl_coef * row.tokens.by_sequence(kl)
    ours = leave_one_out(rewards, torch.arange(len(REWARDS)) // GROUP)
    apart = of_values(ours, batch["advantages"])
    equal("advantages", f"RLOO, {f'k1 {kl_coef} in the reward' if kl_coef else 'no KL'}", apart)


def test_the_gradient_of_the_policy_that_sampled(tmp_path: Path, equal: Record) -> None:
    """At a ratio of 1 TRL's clipped ratio of responses has REINFORCE's gradient, not its value."""
    trainer, batch = sampled(tmp_path, 0.2)
    row = Responses.of(batch)

    def our_loss() -> Tensor:
        logprobs = row.logprobs(trainer.model)
        advantages = row.tokens.spread(batch["advantages"])
        return policy_loss(
            logprobs, logprobs.detach(), advantages, row.tokens, row.tokens.counts(), REINFORCE
        ).value

    apart = difference(trainer.model, our_loss, lambda: trainer.compute_loss(trainer.model, batch))
    apart = replace(apart, loss=None)
    equal("RLOO", "gradient, where the policy has not moved", apart)
