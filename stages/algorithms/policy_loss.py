"""Losses of a policy update: clipped surrogates and policy gradients.

Every kind reports the same metrics, so that runs can be compared. The ratio is that of the policy
to the one before the update: of each token, for GSPO of each response. Its extremes count the
ratio 1 of a policy that has not moved, so a micro-batch without tokens changes nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stages.algorithms.kl import bounded, k3
from stages.algorithms.loss import Counts, Loss, LossAggregation, MetricPart, Per, Tokens
from stages.contracts.objectives import PolicyObjective


@dataclass(frozen=True)
class Objective:
    """The objective: which loss, its clip range, and how token losses are aggregated."""

    kind: PolicyObjective
    clip_low: float
    """The ratio is held above 1 - clip_low; from 1 on there is no such bound."""
    clip_high: float
    """The ratio is held below 1 + clip_high."""
    dual_clip: float | None
    """Dual clip: the ratio's bound where the advantage is negative (clip and gspo)."""
    aggregation: LossAggregation


@dataclass(frozen=True)
class _Terms:
    """Losses by token, and which tokens were clipped."""

    losses: Tensor
    low: Tensor
    high: Tensor
    dual: Tensor | None = None


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    tokens: Tokens,
    counts: Counts,
    objective: Objective,
    *,
    weights: Tensor | None = None,
) -> Loss:
    """A micro-batch's share of the policy's loss; `weights` multiply each token's."""
    logprobs, old_logprobs = tokens.keep(logprobs), tokens.keep(old_logprobs).detach()
    advantages = tokens.keep(advantages).detach()
    if objective.kind is PolicyObjective.GSPO:
        ratio = _sequence_ratio(logprobs, old_logprobs, tokens)
    else:
        ratio = bounded(logprobs - old_logprobs).exp()
    terms = _terms(ratio, logprobs, advantages, objective)
    losses = terms.losses
    if weights is not None:
        losses = losses * tokens.keep(weights).detach()
    value = objective.aggregation.share(losses, tokens, counts)
    ratios = torch.cat([tokens.keep(ratio.detach(), 1.0).flatten(), ratio.new_ones(1)])
    approx_kl = k3(old_logprobs, logprobs.detach())
    metrics = {
        "policy_loss": MetricPart(value.detach(), Per.STEP),
        "approx_kl": MetricPart(tokens.total(approx_kl), Per.TOKEN),
        "clip_fraction_low": MetricPart(tokens.total(terms.low.to(ratio)), Per.TOKEN),
        "clip_fraction_high": MetricPart(tokens.total(terms.high.to(ratio)), Per.TOKEN),
        "ratio_min": MetricPart(ratios.min(), Per.MIN),
        "ratio_max": MetricPart(ratios.max(), Per.MAX),
    }
    if terms.dual is not None:
        metrics["clip_fraction_dual"] = MetricPart(tokens.total(terms.dual.to(ratio)), Per.TOKEN)
    return Loss(value, metrics)


def entropy_bonus(
    entropies: Tensor, tokens: Tokens, counts: Counts, aggregation: LossAggregation
) -> Loss:
    """The entropy bonus: minus the policy's entropy."""
    value = -aggregation.share(entropies, tokens, counts)
    return Loss(value, {"entropy": MetricPart(tokens.total(entropies.detach()), Per.TOKEN)})


def _sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, tokens: Tokens) -> Tensor:
    """GSPO-token (Zheng et al. 2025): each token has its response's length-normalised ratio.

    Its gradient flows through the token's own log-prob alone, so that advantages may differ by
    token; where they do not, and losses are averaged within each response, it is GSPO's gradient.
    """
    mean = tokens.mean_by_sequence((logprobs - old_logprobs).detach())
    return bounded((logprobs - logprobs.detach()) + tokens.spread(mean)).exp()


def _terms(ratio: Tensor, logprobs: Tensor, advantages: Tensor, objective: Objective) -> _Terms:
    lowest, highest = 1 - objective.clip_low, 1 + objective.clip_high
    below, above = ratio < lowest, ratio > highest
    if objective.kind is PolicyObjective.GRADIENT:
        nothing = torch.zeros_like(below)
        return _Terms(-advantages * logprobs, nothing, nothing)
    clipped = ratio.clamp(lowest, highest)
    if objective.kind is PolicyObjective.CISPO:
        # MiniMax-M1 (Chen et al. 2025): a clipped token keeps its gradient, only less of it.
        return _Terms(-clipped.detach() * advantages * logprobs, below, above)
    # Schulman et al. 2017, with a bound on either side of its own (DAPO, Yu et al. 2025).
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    low, high = below & (advantages < 0), above & (advantages > 0)
    if objective.dual_clip is None:
        return _Terms(losses, low, high)
    # Ye et al. 2020: a bad token that became far more likely has no unbounded loss.
    ceiling = -objective.dual_clip * advantages
    dual = (advantages < 0) & (losses > ceiling)
    return _Terms(torch.where(dual, ceiling, losses), low, high, dual)
