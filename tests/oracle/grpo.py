"""TRL's GRPOTrainer beside our policy loss.

Its real path from rollout to loss: our responses come in through `rollout_func`, it computes
log-probs, weights and advantages, the policy moves, and it computes the loss.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.algorithms.kl import kl_loss
from stages.algorithms.loss import Counts, Loss, LossAggregation
from stages.algorithms.mismatch import mismatch_weights
from stages.algorithms.policy_loss import Objective, policy_loss
from stages.contracts.objectives import Aggregation, KlEstimator, Mismatch, PolicyObjective
from tests.oracle import trainers
from tests.oracle.harness import Difference, difference, tokenizer
from tests.oracle.rollouts import (
    GROUP,
    LENGTHS,
    MAX_LENGTH,
    PROMPTS,
    REWARDS,
    Responses,
    move,
    own_tokens,
    responses,
    sampler_logprobs,
    sampling_policy,
)
from tests.oracle.trainers import settings, trl

PPO = Objective(
    PolicyObjective.CLIP,
    clip_low=0.2,
    clip_high=0.28,
    dual_clip=None,
    aggregation=LossAggregation(Aggregation.TOKEN_MEAN),
)
AGGREGATION = {
    "dapo": LossAggregation(Aggregation.TOKEN_MEAN),
    "bnpo": LossAggregation(Aggregation.TOKEN_MEAN),
    "grpo": LossAggregation(Aggregation.SEQUENCE_MEAN_TOKEN_MEAN),
    "dr_grpo": LossAggregation(Aggregation.SEQUENCE_MEAN_TOKEN_SUM, MAX_LENGTH),
}


def a_trainer(folder: Path, *, micro_batches: int = 1, **config: Any) -> Any:
    """With the policy that samples; twice as many iterations as needed, so that it is kept."""
    prompt_ids = tokenizer()([row["prompt"] for row in PROMPTS])["input_ids"]

    def rollout(prompts: list[str], _: Any) -> dict[str, Any]:
        known = {row["prompt"]: ids for row, ids in zip(PROMPTS, prompt_ids, strict=True)}
        return {
            "prompt_ids": [known[prompt] for prompt in prompts],
            "completion_ids": responses(),
            "logprobs": sampler_logprobs(),
            "env_mask": own_tokens(),
        }

    given = {
        **settings(folder, len(LENGTHS) // micro_batches),
        "gradient_accumulation_steps": micro_batches,
        "num_generations": GROUP,
        "num_iterations": 2,
        "max_completion_length": MAX_LENGTH,
        "epsilon": PPO.clip_low,
        "epsilon_high": PPO.clip_high,
        "beta": 0.0,
    }
    trainer = trainers.a_trainer(
        trl.GRPOTrainer,
        sampling_policy(folder / "reference"),
        trl.GRPOConfig(**{**given, **config}),
        PROMPTS,
        reward_funcs=lambda **_: REWARDS,
        rollout_func=rollout,
    )
    trainer.current_gradient_accumulation_steps = micro_batches
    return trainer


def sample(trainer: Any) -> list[dict[str, Tensor]]:
    """TRL's micro-batches of one optimizer step, with its advantages and log-probs."""
    rows = next(iter(trainer.get_train_dataloader()))
    batches = []
    for number in range(trainer.args.gradient_accumulation_steps):
        trainer._step = number
        batches.append(trainer._prepare_inputs(rows))
    return batches


@dataclass(frozen=True)
class Ours:
    """How our loss is set beside TRL's."""

    objective: Objective
    kl_coef: float = 0.0
    estimator: KlEstimator = KlEstimator.K3
    mismatch: Mismatch = Mismatch.NONE
    cap: float = 2.0
    floor: float = 0.0


def beside(trainer: Any, ours: Ours) -> tuple[Difference, Callable[[str], float]]:
    """The difference, and how often our loss clipped."""
    batches = sample(trainer)
    rows = [Responses.of(batch) for batch in batches]
    with torch.no_grad():
        old = [row.logprobs(trainer.model) for row in rows]
        ref = [row.logprobs(trainer.ref_model) if ours.kl_coef else None for row in rows]
    move(trainer.model)
    parts = [row.tokens.counts() for row in rows]
    counts = Counts(sum(part.tokens for part in parts), sum(part.sequences for part in parts))

    def share(number: int) -> Loss:
        row, batch, objective = rows[number], batches[number], ours.objective
        logprobs = row.logprobs(trainer.model)
        advantages = row.tokens.spread(batch["advantages"])
        weights = mismatch_weights(
            old[number],
            batch["sampling_per_token_logps"],
            row.tokens.mask,
            correction=ours.mismatch,
            cap=ours.cap,
            floor=ours.floor,
        ).weights
        loss = policy_loss(
            logprobs, old[number], advantages, row.tokens, counts, objective, weights=weights
        )
        if ref[number] is None:
            return loss
        kl = kl_loss(
            logprobs,
            old[number],
            ref[number],
            row.tokens,
            counts,
            ours.estimator,
            objective.aggregation,
        )
        return loss.plus(kl, ours.kl_coef)

    def trl_loss() -> Tensor:
        return sum(trainer.compute_loss(trainer.model, batch) for batch in batches)

    def metric(name: str) -> float:
        with torch.no_grad():
            return sum(
                float(share(number).metrics[name].share(counts)) for number in range(len(rows))
            )

    apart = difference(
        trainer.model, lambda: sum(share(number).value for number in range(len(rows))), trl_loss
    )
    return apart, metric
