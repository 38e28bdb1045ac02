"""KL(policy || reference) from tokens that the policy sampled (Schulman 2020).

As numbers k1, k2 and k3 are about equal; as losses they are not. Under the policy's own samples the
expected gradient of k1 is zero, that of k2 is the gradient of the KL, and that of k3 is the
gradient of KL(reference || policy). `k3_unbiased` weighs k3 by the importance ratio to the policy
that sampled, through which the gradient flows: its expected gradient is that of the KL whichever
policy sampled.
"""

from collections.abc import Hashable, Sequence

from torch import Tensor

from stages.algorithms.loss import Counts, Loss, LossAggregation, MetricPart, Per, Tokens
from stages.contracts.objectives import KlEstimator
from stages.standard_error import standard_error

MAX_LOG_RATIO = 20.0
"""Log-ratios are held below this before they are exponentiated: past it exp may overflow."""


def bounded(log_ratio: Tensor) -> Tensor:
    """A log-ratio that may be exponentiated; past the bound it has no gradient."""
    return log_ratio.clamp(max=MAX_LOG_RATIO)


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The plain log-ratio: unbiased, of either sign. What PPO takes off the reward."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Half the squared log-ratio: never negative, biased as a number, unbiased as a gradient."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Unbiased and never negative; its gradient is what GRPO adds to the loss."""
    log_ratio = bounded(ref_logprobs - logprobs)
    return log_ratio.exp() - 1 - log_ratio


def kl_estimate(
    kind: KlEstimator,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    old_logprobs: Tensor | None = None,
) -> Tensor:
    """The estimate for each token.

    `old_logprobs` are those of the policy that sampled, for `k3_unbiased`; without them that is
    this very policy.
    """
    if kind is KlEstimator.K1:
        return k1(logprobs, ref_logprobs)
    if kind is KlEstimator.K2:
        return k2(logprobs, ref_logprobs)
    if kind is KlEstimator.K3:
        return k3(logprobs, ref_logprobs)
    sampled = logprobs if old_logprobs is None else old_logprobs
    return bounded(logprobs - sampled.detach()).exp() * k3(logprobs, ref_logprobs)


def reported_kl(
    logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor | None = None
) -> Tensor:
    """The KL of each token as it is reported and limited: k1, whose mean is the KL.

    k3 has the same mean, and a heavy tail: a token sampled against all odds that the reference
    finds likely counts thousands. Of another policy's samples, `old_logprobs` being its own, each
    counts by the importance ratio.
    """
    divergence = k1(logprobs, ref_logprobs)
    if old_logprobs is None:
        return divergence
    return bounded(logprobs - old_logprobs).exp() * divergence


def mean_kl(
    divergence: Tensor, tokens: Tokens, prompts: Sequence[Hashable]
) -> tuple[float, float | None]:
    """Nats per token over all responses, and the standard error of that mean over prompts."""
    sums, lengths = tokens.by_sequence(divergence), tokens.lengths
    error = standard_error(sums.tolist(), prompts, lengths.tolist())
    return float(sums.sum() / lengths.sum()), error


def kl_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    tokens: Tokens,
    counts: Counts,
    estimator: KlEstimator,
    aggregation: LossAggregation,
) -> Loss:
    """The KL to the reference, aggregated as the policy's loss is."""
    estimates = kl_estimate(
        estimator, tokens.keep(logprobs), tokens.keep(ref_logprobs), tokens.keep(old_logprobs)
    )
    value = aggregation.share(estimates, tokens, counts)
    return Loss(value, {"kl_loss": MetricPart(value.detach(), Per.STEP)})


def next_kl_coef(
    coef: float, kl: float, *, target: float, horizon: float, num_sequences: int
) -> float:
    """The coefficient that draws the KL to its target (Ziegler et al. 2019).

    It moves in proportion to the relative error and to num_sequences / horizon, at most by a fifth,
    so it never turns negative.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * min(1.0, num_sequences / horizon))
