"""Importance-sampling corrections for a sampler whose log-probs differ from the trainer's.

The importance weight of a token is trainer / sampler probability, that of a response the product
over its tokens. Truncated importance sampling (Yao et al. 2025) caps it; masked importance sampling
drops what lies outside [floor, cap]. Weights have no gradient and multiply each token's loss.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stages.algorithms.kl import bounded
from stages.algorithms.loss import Tokens
from stages.contracts.objectives import Mismatch

_BY_SEQUENCE = (Mismatch.SEQUENCE_TRUNCATE, Mismatch.SEQUENCE_MASK)
_TRUNCATING = (Mismatch.TOKEN_TRUNCATE, Mismatch.SEQUENCE_TRUNCATE)


@dataclass(frozen=True)
class Mismatched:
    """Weights for each token's loss, and how far trainer and sampler are apart."""

    weights: Tensor
    """[N, T]; 1 where a token is masked."""
    gap_mean: float
    """Of the absolute differences of log-probs."""
    gap_max: float
    effective_sample_size: float
    """The share of tokens (of responses, if corrected by those) that the raw weights leave."""
    masked_share: float
    """Of tokens: dropped, because their weight was outside the bounds."""
    truncated_share: float
    """Of tokens: their weight was cut to the cap."""


def mismatch_weights(
    trainer_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    correction: Mismatch,
    cap: float,
    floor: float,
) -> Mismatched:
    """Weights and gaps of [N, T] log-probs. `floor` is only for the masking corrections."""
    tokens = Tokens.padded(mask)
    gaps = (tokens.keep(trainer_logprobs) - tokens.keep(sampler_logprobs)).detach().double()
    if correction in _BY_SEQUENCE:
        by_sequence = bounded(tokens.by_sequence(gaps)).exp()
        sampled = by_sequence[tokens.lengths > 0]
        raw = tokens.spread(by_sequence)
    else:
        raw = bounded(gaps).exp()
        sampled = raw[tokens.mask]
    capped, outside = raw > cap, (raw < floor) | (raw > cap)
    unchanged = torch.zeros_like(tokens.mask)
    masked = truncated = unchanged
    weights = torch.ones_like(raw)
    if correction in _TRUNCATING:
        truncated, weights = capped, raw.clamp(max=cap)
    elif correction is not Mismatch.NONE:
        masked, weights = outside, torch.where(outside, 0.0, raw)
    num_tokens = max(float(tokens.mask.sum()), 1.0)
    return Mismatched(
        weights=tokens.keep(weights, 1.0).to(trainer_logprobs.dtype),
        gap_mean=float(gaps.abs().sum()) / num_tokens,
        gap_max=float(gaps.abs().max()) if gaps.numel() else 0.0,
        effective_sample_size=_effective_sample_size(sampled),
        masked_share=float(tokens.total(masked.double())) / num_tokens,
        truncated_share=float(tokens.total(truncated.double())) / num_tokens,
    )


def _effective_sample_size(weights: Tensor) -> float:
    """Kish's, as a share: 1 where all weights are equal, 1 / n where one outweighs all others."""
    if not len(weights):
        return 1.0
    return float(weights.sum().square() / (len(weights) * weights.square().sum()))
