"""Sums over tokens, and what they are divided by: exact at any length, and only of what counts."""

import math

import pytest
import torch

from stages.algorithms.loss import Counts, Tokens
from stages.engines.training.loop import counted
from stages.learning.pairs import _chosen_tokens


@pytest.mark.parametrize("length", [2048, 32768])
def test_a_long_responses_logprob_loses_no_digits(length):
    generator = torch.Generator().manual_seed(17)
    logprobs = -4 * torch.rand(2, length, generator=generator)
    sums = Tokens.padded(torch.ones(2, length)).by_sequence(logprobs)
    for row, found in zip(logprobs, sums, strict=True):
        assert found.item() == pytest.approx(math.fsum(row.tolist()), rel=1e-12)


def test_a_policy_that_is_the_reference_has_no_margin_at_any_length():
    """The reference's sums come from a file, as Python adds them up."""
    logprobs = -4 * torch.rand(1, 32768, generator=torch.Generator().manual_seed(17))
    by_policy = Tokens.padded(torch.ones(1, 32768)).by_sequence(logprobs)
    assert abs(by_policy.item() - sum(logprobs[0].tolist())) < 1e-8


def test_the_gradient_of_a_sum_reaches_every_token_in_its_own_precision():
    logprobs = torch.zeros(2, 3, requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    Tokens.padded(mask).by_sequence(logprobs)[0].backward()
    assert torch.equal(logprobs.grad, torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))
    assert Tokens.padded(mask).mean_by_sequence(logprobs).dtype == torch.float32


def test_rows_without_a_token_do_not_count():
    counts = counted([3, 0, 5])
    assert counts([0, 1, 2]) == Counts(8, 2)
    assert counts([1]) == Counts(1, 1), "a step of nothing has a loss of 0, not of 0/0"


def test_a_pair_without_a_token_on_either_side_does_not_count():
    whole = {"chosen_ids": [1, 2], "rejected_ids": [3]}
    cut = {**whole, "rejected_mask": [0]}
    assert [_chosen_tokens(pair) for pair in (whole, cut, {**whole, "rejected_ids": []})] == [
        2,
        0,
        0,
    ]
