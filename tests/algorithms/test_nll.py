"""Supervised fine-tuning's loss: a mean over the tokens of the step, however they are laid out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stages.algorithms.loss import Counts, Loss, Per, Tokens
from stages.algorithms.nll import nll_loss
from tests.algorithms.layouts import (
    MicroBatch,
    counts_of,
    in_any_layout,
    num_tokens,
    random_field,
    unit_lengths,
)


def test_a_token_counts_the_same_in_a_short_and_in_a_long_response():
    logprobs = torch.tensor([[-1.0, -9.0, -9.0], [-2.0, -3.0, -6.0]])
    tokens = Tokens.padded(torch.tensor([[1, 0, 0], [1, 1, 1]]))
    loss = nll_loss(logprobs, -logprobs / 2, tokens, tokens.counts())
    assert float(loss.value) == pytest.approx((1 + 2 + 3 + 6) / 4)
    assert loss.metrics["entropy"].per is Per.TOKEN
    assert float(loss.metrics["entropy"].share(tokens.counts())) == pytest.approx(1.5)


def test_the_counts_are_those_of_the_step_not_of_the_micro_batch():
    tokens = Tokens.padded(torch.ones(1, 2))
    logprobs = torch.tensor([[-1.0, -3.0]])
    loss = nll_loss(logprobs, logprobs, tokens, Counts(tokens=8, sequences=5))
    assert float(loss.value) == pytest.approx(4 / 8)


@given(data=st.data(), lengths=unit_lengths(1), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_a_step_does_not_depend_on_its_layout(data, lengths, seed):
    logprobs = random_field(num_tokens(lengths), seed)
    entropies = random_field(num_tokens(lengths), seed + 1).abs()
    counts = counts_of(lengths)

    def share(batch: MicroBatch, laid: Tensor) -> Loss:
        loss = nll_loss(laid, batch.lay(entropies), batch.tokens, counts)
        return loss

    plain = in_any_layout(data, lengths, logprobs, share)
    torch.testing.assert_close(plain.value, -logprobs.mean())
    torch.testing.assert_close(plain.gradient, torch.full_like(logprobs, -1 / len(logprobs)))
    torch.testing.assert_close(plain.metrics["entropy"], entropies.mean())
