"""Estimates of KL(policy || reference) from tokens that the policy sampled (Schulman 2020)."""

from torch import Tensor


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The plain log-ratio: unbiased, of either sign. What PPO takes off the reward."""
    return logprobs - ref_logprobs


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Never negative, lower variance; its gradient is what GRPO adds to the loss."""
    log_ratio = ref_logprobs - logprobs
    return log_ratio.exp() - 1 - log_ratio
