"""The contract of every loss.

A loss sees one micro-batch and the counts of the whole optimizer step (over all micro-batches and
ranks). It returns a sum divided by those counts: its *share* of the step's loss. Shares add up, so
neither the gradient nor a metric depends on how the step was split, on packing, on the order of
rows or on the number of ranks. A metric says how it is normalised and is reduced the same way.

Tensors over tokens may have any shape, padded on either side ([B, T]) or packed with several
sequences to a row: `Tokens` says which entries count and which sequence each belongs to. What is
masked is never looked at, not even multiplied by zero, because it may be anything.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor

from stages.contracts.objectives import Aggregation


@dataclass(frozen=True)
class Counts:
    """What a loss divides by: the valid tokens and sequences (or pairs) of the optimizer step."""

    tokens: float
    sequences: float


class Per(StrEnum):
    """How a metric is normalised, and so how its parts are put together."""

    TOKEN = "token"
    """A sum over tokens, to be divided by the step's tokens."""
    SEQUENCE = "sequence"
    """A sum over sequences, to be divided by the step's sequences."""
    STEP = "step"
    """A share already: a sum divided by counts of the step."""
    MIN = "min"
    MAX = "max"


@dataclass(frozen=True)
class MetricPart:
    """A micro-batch's part of a metric."""

    value: Tensor
    per: Per

    def share(self, counts: Counts) -> Tensor:
        """What is added over micro-batches and ranks, or compared where it is an extreme."""
        if self.per is Per.TOKEN:
            return self.value.detach() / counts.tokens
        if self.per is Per.SEQUENCE:
            return self.value.detach() / counts.sequences
        return self.value.detach()


@dataclass(frozen=True)
class Loss:
    """A micro-batch's share of the step's loss, and what it says about the step."""

    value: Tensor
    metrics: Mapping[str, MetricPart] = field(default_factory=dict)

    def plus(self, other: "Loss", weight: float = 1.0) -> "Loss":
        """Both losses, with the metrics of both."""
        return Loss(self.value + weight * other.value, {**self.metrics, **other.metrics})


@dataclass(frozen=True)
class Tokens:
    """Which entries of a tensor over tokens count, and whose they are."""

    mask: Tensor
    """True where a token counts."""
    sequence: Tensor
    """The number of the sequence that each entry belongs to, below `num_sequences`."""
    num_sequences: int

    @classmethod
    def padded(cls, mask: Tensor) -> "Tokens":
        """One sequence a row, [B, T]."""
        rows = torch.arange(len(mask), device=mask.device)[:, None].expand_as(mask)
        return cls(mask > 0, rows, len(mask))

    def keep(self, values: Tensor, otherwise: float = 0.0) -> Tensor:
        """The values that count; `otherwise` elsewhere, with no gradient into it."""
        return torch.where(self.mask, values, otherwise)

    def total(self, values: Tensor) -> Tensor:
        """The sum over all tokens that count."""
        return self.keep(values).sum()

    def by_sequence(self, values: Tensor) -> Tensor:
        """[S] sums within each sequence, in float64: added one by one, float32 loses digits."""
        sums = values.new_zeros(self.num_sequences, dtype=torch.float64)
        return sums.index_add(0, self.sequence.reshape(-1), self.keep(values).reshape(-1).double())

    @property
    def lengths(self) -> Tensor:
        """[S] tokens that count in each sequence."""
        return self.by_sequence(self.mask.double())

    def mean_by_sequence(self, values: Tensor) -> Tensor:
        """[S] means within each sequence; 0 for one that is fully masked."""
        return (self.by_sequence(values) / self.lengths.clamp(min=1)).to(values.dtype)

    def spread(self, of_sequence: Tensor) -> Tensor:
        """One value per sequence, given to each of its entries."""
        return of_sequence[self.sequence]

    def counts(self) -> Counts:
        """Of these tokens alone: what a step of one micro-batch on one rank divides by."""
        return Counts(float(self.mask.sum()), float((self.lengths > 0).sum()))


@dataclass(frozen=True)
class LossAggregation:
    """How losses by token become a share of the step's loss."""

    kind: Aggregation
    scale: float = 1.0
    """The constant that `sequence_mean_token_sum` divides by in place of the length."""

    def share(self, values: Tensor, tokens: Tokens, counts: Counts) -> Tensor:
        if self.kind is Aggregation.TOKEN_MEAN:
            return tokens.total(values) / counts.tokens
        if self.kind is Aggregation.SEQUENCE_MEAN_TOKEN_MEAN:
            return tokens.mean_by_sequence(values).sum() / counts.sequences
        return tokens.total(values) / (self.scale * counts.sequences)
