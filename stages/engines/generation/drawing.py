"""Drawing tokens from logits: counter-based random numbers, exact sums, and the cuts.

The random number that picks the token at a position is a hash of (the sample's seed, the position),
so a sample does not depend on its neighbours in the batch, nor on how many there are. A token's
probability is an integer, its share of the likeliest token's, so that sums of them are the same in
any order: a draw does not depend on how a device adds.

Shapes: [B, V] for B sequences and V tokens in the vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.engines.generation.generator import Sampling

MASS = 2.0**44
"""The likeliest token's probability as an integer: half a million such fit 63 bits."""
GREEDY = -1.0
"""In place of a random number: take the likeliest token."""


@dataclass(frozen=True)
class Drawn:
    """[B] tokens, their log-probs, the entropies they were drawn with; [B, V] what was not cut."""

    tokens: Tensor
    logprobs: Tensor
    entropies: Tensor
    kept: Tensor | None


def draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> Drawn:
    """A token a row, by a random number each, or the likeliest where that is GREEDY."""
    logits = logits.float() / sampling.temperature
    distribution = torch.log_softmax(logits, dim=-1)
    kept = None
    if sampling.cuts:
        kept = within_support(distribution, sampling)
        logits = logits.masked_fill(~kept, -torch.inf)
        distribution = torch.log_softmax(logits, dim=-1)
    drawn = _inverse_cdf(logits, uniform)
    tokens = torch.where(uniform < 0, logits.argmax(-1), drawn)
    # A token that was cut off adds 0 times something finite.
    finite = distribution.clamp(min=torch.finfo(distribution.dtype).min)
    return Drawn(
        tokens,
        distribution.gather(-1, tokens[:, None]).squeeze(-1),
        -(distribution.exp() * finite).sum(-1),
        kept,
    )


def within_support(logprobs: Tensor, sampling: Sampling) -> Tensor:
    """[B, V] whether a token is left after the cuts; the likeliest always is."""
    ranked, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    kept = torch.ones_like(ranked, dtype=torch.bool)
    if sampling.min_p > 0:
        kept &= ranked >= ranked[:, :1] + math.log(sampling.min_p)
    if sampling.top_k > 0:
        kept[:, sampling.top_k :] = False
    if sampling.top_p < 1:
        # The tokens that are kept so far are the first ones: the total is theirs.
        cumulative = _masses(ranked).masked_fill(~kept, 0).cumsum(-1)
        likelier = torch.nn.functional.pad(cumulative[:, :-1], (1, 0))
        kept &= likelier < sampling.top_p * cumulative[:, -1:].double()
    return torch.zeros_like(kept).scatter(-1, ids, kept)


def add_supports(supports: list[list[list[int]]], kept: Tensor) -> None:
    """Add a step's support, [n, V], to n lists of supports."""
    ids = kept.nonzero()[:, 1].tolist()
    start = 0
    for support, size in zip(supports, kept.sum(-1).tolist(), strict=True):
        support.append(ids[start : start + size])
        start += size


def uniforms(seeds: Tensor, positions: Tensor | int) -> Tensor:
    """Numbers in [0, 1), float64: a hash of an int64 seed and a position each (splitmix64)."""
    counters = torch.as_tensor(positions, device=seeds.device) + 1
    bits = seeds + counters * _signed(0x9E3779B97F4A7C15)
    bits = (bits ^ _shift_right(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(0x94D049BB133111EB)
    bits = bits ^ _shift_right(bits, 31)
    uniform: Tensor = _shift_right(bits, 11).double() / 2.0**53
    return uniform


def _signed(value: int) -> int:
    """The int64 with the same 64 bits: int64 arithmetic wraps around as unsigned does."""
    return value - 2**64 if value >= 2**63 else value


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """A logical shift: zeros come in from the left, whatever the sign."""
    shifted: Tensor = (bits >> count) & (2 ** (64 - count) - 1)
    return shifted


def _inverse_cdf(logits: Tensor, uniform: Tensor) -> Tensor:
    """[B] the token at which the cumulative probability passes the uniform number."""
    cumulative = _masses(logits).cumsum(-1)
    total = cumulative[:, -1]
    # Rounded up to the total, it would be passed by no token.
    threshold = torch.minimum((uniform.clamp(min=0) * total).long(), total - 1)
    return (cumulative <= threshold[:, None]).sum(-1)


def _masses(logits: Tensor) -> Tensor:
    """[B, V] probabilities as integers, in units of the likeliest token's / MASS."""
    masses: Tensor = ((logits - logits.amax(-1, keepdim=True)).exp() * MASS).long()
    return masses
