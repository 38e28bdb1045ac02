"""Advantages against numbers worked out by hand, and what padding must not change."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.algorithms.advantages import gae, group_relative, token_rewards, whiten


def test_gae_matches_a_hand_computed_example():
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    values = torch.tensor([[0.5, 0.4, 0.6]])
    mask = torch.ones(1, 3)
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.5)
    # delta_2 = 1 - 0.6 = 0.4; delta_1 = 0.9*0.6 - 0.4 = 0.14; delta_0 = 0.9*0.4 - 0.5 = -0.14
    # A_2 = 0.4; A_1 = 0.14 + 0.45*0.4 = 0.32; A_0 = -0.14 + 0.45*0.32 = 0.004
    torch.testing.assert_close(advantages, torch.tensor([[0.004, 0.32, 0.4]]))
    torch.testing.assert_close(returns, torch.tensor([[0.504, 0.72, 1.0]]))


def test_gae_with_lambda_one_and_no_discount_is_the_return_minus_the_value():
    rewards = torch.tensor([[-0.1, -0.2, 1.0]])
    values = torch.tensor([[0.3, 0.2, 0.1]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3), gamma=1.0, lam=1.0)
    torch.testing.assert_close(returns, torch.tensor([[0.7, 0.8, 1.0]]))
    torch.testing.assert_close(advantages, returns - values)


def test_gae_does_not_decay_through_masked_tokens():
    dense = gae(
        torch.tensor([[0.0, 1.0]]), torch.tensor([[0.2, 0.3]]), torch.ones(1, 2), gamma=0.9, lam=0.8
    )
    gapped = gae(
        torch.tensor([[0.0, 5.0, 1.0]]),
        torch.tensor([[0.2, 7.0, 0.3]]),
        torch.tensor([[1.0, 0.0, 1.0]]),
        gamma=0.9,
        lam=0.8,
    )
    for a, b in zip(dense, gapped, strict=True):
        torch.testing.assert_close(a, b[:, [0, 2]])


@given(length=st.integers(1, 6), padding=st.integers(0, 5), seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_gae_ignores_what_stands_in_the_padding(length, padding, seed):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 1, length + padding, generator=generator)
    mask = (torch.arange(length + padding) < length).float()[None]
    padded = gae(rewards, values, mask, gamma=0.99, lam=0.9)
    plain = gae(rewards[:, :length], values[:, :length], mask[:, :length], gamma=0.99, lam=0.9)
    for a, b in zip(padded, plain, strict=True):
        torch.testing.assert_close(a[:, :length], b)
        assert not a[:, length:].any()


def test_the_reward_lands_on_the_last_response_token():
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    penalties = torch.full((2, 3), 0.1)
    rewards = token_rewards(torch.tensor([2.0, 3.0]), penalties, mask)
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 1.9, 0.0], [-0.1, -0.1, 2.9]]))


def test_grpo_advantages_match_a_hand_computed_example():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 5.0, 5.0], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    centred, num_flat = group_relative(rewards, groups, normalise_by_std=False)
    assert centred.tolist() == [0.5, -0.5, -0.5, 0.5, 0.0, 0.0]
    assert num_flat == 1
    scaled, _ = group_relative(rewards, groups, normalise_by_std=True)
    assert scaled.tolist() == pytest.approx([1, -1, -1, 1, 0, 0], abs=1e-5)


def test_grpo_groups_need_not_be_neighbours():
    rewards = torch.tensor([1.0, 4.0, 3.0, 8.0])
    centred, _ = group_relative(rewards, torch.tensor([0, 1, 0, 1]), normalise_by_std=False)
    assert centred.tolist() == [-1.0, -2.0, 1.0, 2.0]


def test_whitening_counts_only_what_is_not_masked():
    values = torch.tensor([[1.0, 3.0, 100.0], [5.0, 7.0, -100.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    white = whiten(values, mask)
    assert white[:, 2].tolist() == [0.0, 0.0]
    kept = white[mask > 0]
    assert float(kept.mean()) == pytest.approx(0, abs=1e-6)
    assert float(kept.std(correction=0)) == pytest.approx(1, abs=1e-5)
