"""Losses: hand-computed values, and gradients that do not depend on how a step is split."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.algorithms.bradley_terry import bradley_terry_loss, tokens_that_differ
from stages.algorithms.kl import k1, k3
from stages.algorithms.policy_loss import clipped_policy_loss
from stages.algorithms.value_loss import clipped_value_loss, explained_variance

CLIP = {"clip_low": 0.2, "clip_high": 0.3}


def test_the_policy_loss_is_clipped_only_where_that_makes_it_worse():
    ratio = torch.tensor([[0.5, 0.5, 2.0, 2.0]])
    advantages = torch.tensor([[1.0, -1.0, 3.0, -1.0]])
    result = clipped_policy_loss(
        ratio.log(), torch.zeros(1, 4), advantages, torch.ones(1, 4), **CLIP
    )
    # min(0.5, 0.8) + min(-0.5, -0.8) + 3 min(2, 1.3) + min(-2, -1.3)
    assert float(result.loss) == pytest.approx(-(0.5 - 0.8 + 3 * 1.3 - 2.0))
    assert (int(result.num_clipped_low), int(result.num_clipped_high)) == (1, 1)
    assert (float(result.ratio_min), float(result.ratio_max)) == pytest.approx((0.5, 2.0))


def test_the_value_loss_takes_the_worse_of_the_value_and_the_clipped_value():
    loss = clipped_value_loss(
        torch.tensor([[1.0]]),
        torch.tensor([[0.0]]),
        torch.tensor([[1.0]]),
        torch.ones(1, 1),
        clip=0.2,
    )
    assert float(loss) == pytest.approx(0.5 * 0.8**2)


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant():
    returns, mask = torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    assert explained_variance(returns, returns, mask) == pytest.approx(1.0)
    assert explained_variance(torch.full((1, 3), 4.0), returns, mask) == pytest.approx(0.0)


def test_kl_estimates_agree_in_the_mean_and_k3_is_never_negative():
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.4, 0.4, 0.2])
    exact = float((policy * (policy / reference).log()).sum())
    for estimate in (k1, k3):
        per_token = estimate(policy.log(), reference.log())
        assert float((policy * per_token).sum()) == pytest.approx(exact, abs=1e-6)
    assert (k3(policy.log(), reference.log()) >= 0).all()
    assert not k3(policy.log(), policy.log()).any()


def test_bradley_terry_is_the_log_likelihood_of_the_preference():
    chosen, rejected = torch.tensor([[2.0]]), torch.tensor([[0.5]])
    loss = bradley_terry_loss(chosen, rejected, torch.ones(1, 1), centre=0.0)
    assert float(loss) == pytest.approx(-math.log(1 / (1 + math.exp(-1.5))))
    centred = bradley_terry_loss(chosen, rejected, torch.ones(1, 1), centre=0.1)
    assert float(centred - loss) == pytest.approx(0.1 * 2.5**2)


def test_preferences_are_compared_from_the_first_difference_to_the_longer_end():
    chosen = torch.tensor([[5, 6, 7, 0], [5, 6, 0, 0]])
    rejected = torch.tensor([[5, 8, 0, 0], [5, 6, 9, 0]])
    mask = tokens_that_differ(
        chosen,
        rejected,
        torch.tensor([[1.0, 1, 1, 0], [1, 1, 0, 0]]),
        torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 0]]),
    )
    assert mask.tolist() == [[0, 1, 1, 0], [0, 0, 1, 0]]


def _losses(logits, rows, num_tokens, data):
    """A step's share of policy, value and KL losses on some rows of `data`."""
    old, advantages, returns, mask = (tensor[rows] for tensor in data)
    values = logits[rows] * 0.5
    policy = clipped_policy_loss(logits[rows], old, advantages, mask, **CLIP).loss
    value = clipped_value_loss(values, old, returns, mask, clip=0.2)
    kl = (k3(logits[rows], old) * mask).sum()
    return (policy + value + 0.1 * kl) / num_tokens


def _batch(seed, num_rows, length):
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, length)
    logits, old, advantages, returns = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4)
    )
    lengths = torch.randint(1, length + 1, (num_rows, 1), generator=generator)
    mask = (torch.arange(length) < lengths).double()
    return logits.requires_grad_(), (old, advantages, returns, mask)


def _gradient(logits, parts, num_tokens, data):
    logits.grad = None
    for rows in parts:
        _losses(logits, rows, num_tokens, data).backward()
    return logits.grad.clone()


@given(
    seed=st.integers(0, 10_000),
    num_rows=st.integers(2, 9),
    size=st.integers(1, 9),
    length=st.integers(1, 6),
)
@settings(max_examples=50, deadline=None)
def test_the_gradient_of_a_step_does_not_depend_on_its_split_into_micro_batches(
    seed, num_rows, size, length
):
    logits, data = _batch(seed, num_rows, length)
    num_tokens = data[-1].sum()
    rows = list(range(num_rows))
    whole = _gradient(logits, [rows], num_tokens, data)
    split = [rows[i : i + size] for i in range(0, num_rows, size)]
    torch.testing.assert_close(
        whole, _gradient(logits, split, num_tokens, data), atol=1e-6, rtol=1e-6
    )


@given(seed=st.integers(0, 10_000), padding=st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_padding_and_fully_masked_rows_change_nothing(seed, padding):
    logits, data = _batch(seed, 4, 5)
    num_tokens = data[-1].sum()
    plain = _losses(logits, list(range(4)), num_tokens, data)
    garbage = torch.full((4, padding), 1e3, dtype=torch.float64)
    *tensors, mask = data
    wider = [torch.cat([tensor, garbage], dim=1) for tensor in tensors]
    taller = [torch.cat([tensor, tensor[:1]]) for tensor in wider]
    taller.append(torch.nn.functional.pad(mask, (0, padding, 0, 1)))
    padded_logits = torch.cat([logits, garbage], dim=1)
    padded_logits = torch.cat([padded_logits, padded_logits[:1]])
    padded = _losses(padded_logits, list(range(5)), num_tokens, taller)
    torch.testing.assert_close(plain, padded, atol=1e-9, rtol=1e-9)
