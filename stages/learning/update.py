"""The input and the result of a policy update, whatever its algorithm."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from torch import Tensor

from stages.context import Context
from stages.contracts.policy_update import PolicyUpdateConfig
from stages.data.schema import ExperienceRow, ScoredRollout
from stages.engines.models.loaders import FRESH, Loaders
from stages.engines.processes.ranks import Ranks
from stages.engines.training.learner import AnyLearner, Optimization
from stages.engines.training.learners import open_learner
from stages.engines.training.loop import Plan, Work, train
from stages.engines.training.resume import Metrics
from stages.engines.training.rl_state import RlState
from stages.engines.training.schedules import scheduled

Rollouts = Sequence[ScoredRollout]


@dataclass(frozen=True)
class Update:
    """One iteration: the policy as it is, its scored responses, and where it comes from."""

    config: PolicyUpdateConfig
    inputs: Mapping[str, Path]
    ctx: Context
    ranks: Ranks
    state: RlState
    learners: Mapping[str, AnyLearner]
    """The policy and, for PPO, the critic."""
    rollouts: Rollouts
    """With their scores; an algorithm gets those that were sampled, without the greedy ones."""
    greedy: Mapping[str, float] = field(default_factory=dict)
    """The reward of each prompt's greedy response, where there is one."""
    load: Loaders = FRESH
    """Where other models come from, such as a teacher."""

    @property
    def policy(self) -> AnyLearner:
        return self.learners["policy"]

    def plan(self, num_rows: int, epochs: int | None = None) -> Plan:
        """Optimizer steps over so many rows; the schedule continues from the iteration before."""
        params = self.config.policy_update
        return Plan(
            num_rows=num_rows,
            batch_size=params.batch_size,
            epochs=params.epochs if epochs is None else epochs,
            seed=self.ctx.seed,
            learning_rate=scheduled(
                params.schedule,
                steps_before=self.state.steps,
                warmup=params.warmup_steps,
                decay=params.decay_steps,
                floor=params.min_learning_rate,
            ),
        )

    def train(self, plan: Plan, work: Work, shown: Sequence[str]) -> list[Metrics]:
        """Train the policy alone."""
        return train(self.ctx, {"policy": self.policy}, plan, work, shown=shown, ranks=self.ranks)


def continued_learner(
    ctx: Context,
    ranks: Ranks,
    model: Any,
    name: str,
    learning_rate: float,
    config: PolicyUpdateConfig,
    state: RlState,
) -> AnyLearner:
    """A learner that continues with the optimizer moments of the iteration before."""
    params = config.policy_update
    how = Optimization(
        learning_rate=learning_rate,
        max_grad_norm=params.max_grad_norm,
        weight_decay=params.weight_decay,
        decay_norms_and_biases=params.decay_norms_and_biases,
        betas=(params.beta1, params.beta2),
        epsilon=params.adam_epsilon,
        precision=config.precision,
    )
    learner = open_learner(ctx, ranks, model, how)
    learner.load(state.of(name))
    return learner


class SampleRole(StrEnum):
    """What a sample was to the policy that learnt from it."""

    POLICY_GRADIENT = "policy_gradient"
    CHOSEN = "chosen"
    REJECTED = "rejected"
    IMITATED = "imitated"
    DISTILLED = "distilled"


def trained_on(
    samples: Rollouts, role: SampleRole, advantages: Tensor | None = None
) -> list[ExperienceRow]:
    """The samples that were trained on in one role.

    `advantages`, [N, T], are those that the loss was given for them, row by row.
    """
    return [
        {
            "prompt_id": row["prompt_id"],
            "sample_index": row["sample_index"],
            "role": role.value,
            "reward": row["reward"],
            "advantages": None
            if advantages is None
            else advantages[index, : len(row["response_ids"])].tolist(),
        }
        for index, row in enumerate(samples)
    ]


def by_prompt(rollouts: Rollouts) -> list[list[ScoredRollout]]:
    """The responses to each prompt, in the order in which they are first met."""
    groups: dict[str, list[ScoredRollout]] = {}
    for row in rollouts:
        groups.setdefault(row["prompt_id"], []).append(row)
    return list(groups.values())


@dataclass(frozen=True)
class UpdateResult:
    """The result of an update."""

    history: Sequence[Metrics]
    experience: Sequence[ExperienceRow]
    """The samples that the policy was trained on, by `trained_on`."""
    metrics: Mapping[str, float | int] = field(default_factory=dict)
    """Metrics of the rollouts that it learnt from."""
    kl_coef: float | None = None
    """The KL coefficient of the next iteration, where it is adaptive."""
