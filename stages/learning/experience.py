"""What a policy update learns from, computed once from the policy and critic it starts with.

All tensors are [N, T]: N responses, T tokens in the longest, padded on the right. Tokens that a
response's loss mask leaves out are masked as padding is: they are paid nothing, and count nowhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stages.algorithms.advantages import (
    against_baseline,
    discounted_returns,
    gae,
    group_centred,
    group_relative,
    leave_one_out,
    reinforce_plus_plus,
    token_rewards,
    whiten,
)
from stages.algorithms.kl import k1, kl_estimate, reported_kl
from stages.algorithms.mismatch import Mismatched, mismatch_weights
from stages.algorithms.value_loss import explained_variance
from stages.context import Context, StageError
from stages.contracts.objectives import KlPlace
from stages.contracts.policy_update import PolicyUpdateConfig, PolicyUpdateParams
from stages.contracts.rl import Algorithm
from stages.data.batching import loss_masks_of, pad, to_device
from stages.data.segments import Piece
from stages.engines.forward.inference import Quantity, kept_over_responses, logprobs_by
from stages.engines.forward.scalars import response_values
from stages.learning.credit import (
    advantages_of_turns,
    discount_of,
    is_by_turn,
    rewards_by_token,
)
from stages.learning.update import Rollouts, Update


@dataclass(frozen=True)
class Measured:
    """Log-probs of the responses by trainer and reference, and how far the sampler's are apart."""

    mask: Tensor
    logprobs: Tensor
    """Of the policy before the update, as the trainer computes them."""
    ref_logprobs: Tensor
    """Where there is no reference, `logprobs` again."""
    mismatch: Mismatched
    has_reference: bool = True

    @property
    def kl_to_reference(self) -> float:
        """Nats per token."""
        divergence = reported_kl(self.logprobs, self.ref_logprobs) * self.mask
        return float(divergence.sum() / self.mask.sum())

    def kl_metrics(self) -> dict[str, float | int]:
        return {"kl_to_reference": self.kl_to_reference} if self.has_reference else {}

    @property
    def kl_per_response(self) -> float:
        """Nats per response, k1: what an adaptive KL coefficient is updated by."""
        divergence = k1(self.logprobs, self.ref_logprobs) * self.mask
        return float(divergence.sum() / len(self.mask))

    def metrics(self) -> dict[str, float | int]:
        return {
            "logprob_gap_mean": self.mismatch.gap_mean,
            "logprob_gap_max": self.mismatch.gap_max,
            "effective_samples": self.mismatch.effective_sample_size,
            "mismatch_masked": self.mismatch.masked_share,
            "mismatch_truncated": self.mismatch.truncated_share,
        }


@dataclass(frozen=True)
class Experience:
    """Rollouts as a policy gradient sees them."""

    mask: Tensor
    logprobs: Tensor
    """Of the policy before the update."""
    ref_logprobs: Tensor
    weights: Tensor
    """Importance weights of the trainer's policy over the sampler's."""
    advantages: Tensor
    values: Tensor
    """Of the critic before the update (PPO)."""
    returns: Tensor
    """The critic's targets (PPO)."""

    def select(self, pieces: Sequence[Piece], num_steps: int, device: str) -> "Experience":
        """Pieces of the rows, cut to the longest among them."""
        return replace(
            self,
            **{
                field.name: to_device(
                    selected(getattr(self, field.name), pieces, num_steps), device
                )
                for field in fields(self)
            },
        )

    def metrics(self) -> dict[str, float | int]:
        kept = self.mask > 0
        return {"advantage_std": float(self.advantages[kept].std(correction=0))}


def selected(values: Tensor, pieces: Sequence[Piece], num_steps: int) -> Tensor:
    """[P, num_steps] what [N, T] values say of pieces of the rows; anything past their ends."""
    rows = torch.tensor([[piece.of] for piece in pieces])
    steps = torch.tensor([[piece.start] for piece in pieces]) + torch.arange(num_steps)
    return values[rows, steps.clamp(max=values.shape[1] - 1)]


def measure(ctx: Context, policy: Any, rollouts: Rollouts, config: PolicyUpdateConfig) -> Measured:
    """Trainer log-probs beside the sampler's and the reference's; StageError if too far apart."""
    by_trainer = logprobs_by("trainer", lambda: policy, config.temperature)
    logprobs = kept_over_responses(ctx, "trainer", rollouts, by_trainer)
    return compare(pad(logprobs, 0.0), rollouts, config)


def compare(logprobs: Tensor, rollouts: Rollouts, config: PolicyUpdateConfig) -> Measured:
    """These log-probs of the trainer's beside the others; StageError if too far apart."""
    params, device = config.policy_update, logprobs.device
    mask = to_device(loss_masks_of(rollouts), device)
    mismatch = mismatch_weights(
        logprobs,
        to_device(pad([row["logprobs"] for row in rollouts], 0.0), device),
        mask,
        correction=params.mismatch,
        cap=params.mismatch_cap,
        floor=params.mismatch_floor,
    )
    measured = _measured(mask, logprobs, rollouts, mismatch)
    _check_mismatch(mismatch, params)
    for kl in measured.kl_metrics().values():
        check_kl(kl, params)
    return measured


def as_sampled(rollouts: Rollouts) -> Measured:
    """Before the trainer has evaluated its policy (old_logprobs.py): the sampler's log-probs."""
    mask = loss_masks_of(rollouts)
    equal = Mismatched(
        weights=torch.ones_like(mask),
        gap_mean=0.0,
        gap_max=0.0,
        effective_sample_size=1.0,
        masked_share=0.0,
        truncated_share=0.0,
    )
    return _measured(mask, pad([row["logprobs"] for row in rollouts], 0.0), rollouts, equal)


def _measured(mask: Tensor, logprobs: Tensor, rollouts: Rollouts, mismatch: Mismatched) -> Measured:
    if not has_reference(rollouts):
        return Measured(mask, logprobs, logprobs, mismatch, has_reference=False)
    reference = to_device(
        pad([row["ref_logprobs"] or () for row in rollouts], 0.0), logprobs.device
    )
    return Measured(mask, logprobs, reference, mismatch)


def has_reference(rollouts: Rollouts) -> bool:
    """Whether score has computed the reference's log-probs."""
    return rollouts[0]["ref_logprobs"] is not None


def experience_of(
    update: Update, measured: Measured, kl_coef: float, values: Tensor | None = None
) -> Experience:
    """The advantages of the algorithm that `rl` names; `values` are the critic's, for PPO."""
    advantages, returns = _advantages(update, measured, kl_coef, values)
    return with_advantages(measured, advantages, values, returns)


def with_advantages(
    measured: Measured,
    advantages: Tensor,
    values: Tensor | None = None,
    returns: Tensor | None = None,
) -> Experience:
    """`values` and `returns` are zeros where there is no critic."""
    nothing = torch.zeros_like(measured.logprobs)
    return Experience(
        mask=measured.mask,
        logprobs=measured.logprobs,
        ref_logprobs=measured.ref_logprobs,
        weights=measured.mismatch.weights,
        advantages=advantages,
        values=nothing if values is None else values,
        returns=nothing if returns is None else returns,
    )


def _advantages(
    update: Update, measured: Measured, kl_coef: float, values: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """[N, T] advantages, and for PPO the critic's targets."""
    params, mask = update.config.policy_update, measured.mask
    rewards = torch.tensor([row["reward"] for row in update.rollouts])
    groups = group_numbers(update.rollouts)
    penalties = token_penalties(measured, params, kl_coef)
    # Algorithms that give a response one advantage see its reward and penalties as one number.
    paid = rewards - (penalties * mask).sum(1)
    by_token = rewards_by_token(update.rollouts, penalties, mask)
    discount = discount_of(update.config, update.rollouts, mask)
    match update.config.algorithm:
        case Algorithm.PPO:
            assert values is not None
            advantages, returns = gae(by_token, values, mask, gamma=discount, lam=params.gae_lambda)
            return (whiten(advantages, mask) if params.whiten_advantages else advantages), returns
        case Algorithm.REINFORCE:
            returns = discounted_returns(by_token, mask, gamma=discount)
            return (whiten(returns, mask) if params.whiten_advantages else returns), None
        case Algorithm.REINFORCE_PP:
            return reinforce_plus_plus(by_token, mask, gamma=discount), None
        case Algorithm.REINFORCE_PP_BASELINE:
            by_token = token_rewards(group_centred(rewards, groups), penalties, mask)
            return reinforce_plus_plus(by_token, mask, gamma=params.gamma), None
        case Algorithm.GRPO | Algorithm.RLOO:
            compare = leave_one_out
            if update.config.algorithm is Algorithm.GRPO:
                compare = partial(
                    group_relative,
                    normalise_by_std=params.normalise_by_std,
                    leave_one_out=params.leave_one_out,
                )
            if is_by_turn(update.rollouts):
                of_turns = (update.config, update.rollouts, penalties, mask, groups, compare)
                return advantages_of_turns(*of_turns), None
            of_response = compare(paid, groups)
        case Algorithm.REMAX:
            baselines = [update.greedy[row["prompt_id"]] for row in update.rollouts]
            of_response = against_baseline(paid, torch.tensor(baselines))
        case other:
            raise ValueError(f"{other} has no advantages")
    return of_response[:, None] * mask, None


def token_penalties(measured: Measured, params: PolicyUpdateParams, kl_coef: float) -> Tensor:
    """[N, T] the KL penalty of each token, where that is part of the reward; else zeros."""
    if params.kl_in is KlPlace.LOSS:
        return torch.zeros_like(measured.logprobs)
    return kl_coef * kl_estimate(params.kl_estimator, measured.logprobs, measured.ref_logprobs)


def critic_values(ctx: Context, critic: Any, rollouts: Rollouts) -> Tensor:
    """[N, T] the critic's value before each token."""
    values = Quantity("the critic's value", "critic values", lambda: critic, response_values)
    return pad(kept_over_responses(ctx, "critic", rollouts, values), 0.0)


def how_well_explained(experience: Experience) -> float:
    """Explained variance: the share of the returns' variance that the critic predicts."""
    return explained_variance(experience.values, experience.returns, experience.mask)


def group_numbers(rollouts: Rollouts) -> Tensor:
    """[N] group ids: one number per prompt."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(r["prompt_id"], len(numbers)) for r in rollouts])


def check_kl(kl: float, params: PolicyUpdateParams) -> None:
    """StageError where the KL to the reference is above `max_kl`."""
    if not kl <= params.max_kl:
        raise StageError(
            f"the policy is {kl:.3g} nats per token from the SFT policy, more than "
            f"policy_update.max_kl {params.max_kl}: raise policy_update.kl_coef, or lower its "
            "learning_rate"
        )


def _check_mismatch(mismatch: Mismatched, params: PolicyUpdateParams) -> None:
    if not mismatch.gap_mean <= params.max_logprob_gap:
        raise StageError(
            f"trainer and sampler log-probs differ by {mismatch.gap_mean:.4g} on average "
            f"(policy_update.max_logprob_gap is {params.max_logprob_gap}): the two do not compute "
            "the same policy, in precision, kernels or temperature, and the update would learn "
            "from wrong ratios"
        )
    if mismatch.masked_share > 1 - params.min_effective_samples:
        raise StageError(
            f"policy_update.mismatch {params.mismatch} leaves {1 - mismatch.masked_share:.1%} of "
            f"the tokens (policy_update.min_effective_samples is {params.min_effective_samples}): "
            "the sampler is too far from the trainer. Bring the two together in precision and "
            "kernels"
        )
    if mismatch.effective_sample_size < params.min_effective_samples:
        raise StageError(
            f"the difference of trainer and sampler leaves an effective sample size of "
            f"{mismatch.effective_sample_size:.3g} (policy_update.min_effective_samples is "
            f"{params.min_effective_samples}): few responses would outweigh all others. Bring the "
            "two together in precision and kernels, or choose a correction by token"
        )
