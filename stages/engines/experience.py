"""What a policy update learns from, computed once from the policy and critic it starts with.

All tensors are [N, T]: N responses, T tokens in the longest, padded on the right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from stages.algorithms.advantages import gae, group_relative, token_rewards, whiten
from stages.algorithms.kl import k1, k3
from stages.algorithms.value_loss import explained_variance
from stages.context import Context
from stages.contracts.policy_update import PolicyUpdateParams
from stages.data.batching import pad
from stages.engines.inference import over_responses
from stages.engines.models import response_logprobs, response_values

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Experience:
    """Rollouts as tensors, and what is to be known about them."""

    mask: Tensor
    logprobs: Tensor
    """Of the policy before the update, as the trainer computes them."""
    ref_logprobs: Tensor
    advantages: Tensor
    values: Tensor
    """Of the critic before the update (PPO)."""
    returns: Tensor
    """What the critic should have said (PPO)."""
    logprob_gap_mean: float
    logprob_gap_max: float
    kl_to_reference: float
    zero_variance_groups: int
    advantage_std: float = 0.0
    explained_variance: float | None = None

    def select(self, rows: Sequence[int], num_steps: int, device: str) -> "Experience":
        """Some rows, cut to the longest response among them."""
        tensors: dict[str, Any] = {
            field.name: value[list(rows), :num_steps].to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **tensors)

    def summary(self) -> dict[str, float | int]:
        metrics: dict[str, float | int] = {
            "logprob_gap_mean": self.logprob_gap_mean,
            "logprob_gap_max": self.logprob_gap_max,
            "zero_variance_groups": self.zero_variance_groups,
            "advantage_std": self.advantage_std,
        }
        if self.explained_variance is not None:
            metrics["explained_variance"] = self.explained_variance
        return metrics


def measure(
    ctx: Context, policy: Any, rollouts: Rows, params: PolicyUpdateParams, temperature: float
) -> Experience:
    """Trainer log-probs beside the sampler's and the reference's, with GRPO's advantages:

    each response's reward against those of its group, the same for all its tokens.
    """
    logprobs = pad(
        over_responses(
            ctx,
            policy,
            rollouts,
            lambda batch: response_logprobs(policy, batch, temperature).logprobs,
        ),
        0.0,
    )
    mask = pad([[1.0] * len(row["response_ids"]) for row in rollouts], 0.0)
    ref_logprobs = pad([row["ref_logprobs"] for row in rollouts], 0.0)
    gap = (logprobs - pad([row["logprobs"] for row in rollouts], 0.0)).abs()
    numbers: dict[str, int] = {}
    groups = [numbers.setdefault(row["prompt_id"], len(numbers)) for row in rollouts]
    relative, num_flat = group_relative(
        torch.tensor([row["reward"] for row in rollouts]),
        torch.tensor(groups),
        normalise_by_std=params.normalise_by_std,
    )
    advantages = relative[:, None] * mask
    nothing = torch.zeros_like(logprobs)
    return Experience(
        mask=mask,
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        advantages=advantages,
        values=nothing,
        returns=nothing,
        logprob_gap_mean=float(gap.sum() / mask.sum()),
        logprob_gap_max=float(gap.max()),
        kl_to_reference=float((k3(logprobs, ref_logprobs) * mask).sum() / mask.sum()),
        zero_variance_groups=num_flat,
        advantage_std=float(advantages[mask > 0].std(correction=0)),
    )


def ppo_experience(
    ctx: Context,
    critic: Any,
    rollouts: Rows,
    params: PolicyUpdateParams,
    measured: Experience,
    lam: float | None = None,
) -> Experience:
    """With PPO's advantages: reward on the last token, KL penalty on each, GAE, whitened.

    `lam` stands in for params.gae_lambda.
    """
    mask = measured.mask
    values = pad(
        over_responses(ctx, critic, rollouts, lambda batch: response_values(critic, batch)), 0.0
    )
    final = torch.tensor([row["reward"] for row in rollouts])
    penalties = params.kl_coef * k1(measured.logprobs, measured.ref_logprobs)
    advantages, returns = gae(
        token_rewards(final, penalties, mask),
        values,
        mask,
        gamma=params.gamma,
        lam=params.gae_lambda if lam is None else lam,
    )
    return replace(
        measured,
        advantages=whiten(advantages, mask),
        values=values,
        returns=returns,
        advantage_std=float(advantages[mask > 0].std(correction=0)),
        explained_variance=explained_variance(values, returns, mask),
    )
