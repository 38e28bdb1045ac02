"""Advantages against numbers worked out by hand, and what masked tokens must not change."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stages.algorithms.advantages import (
    against_baseline,
    discounted_returns,
    gae,
    group_centred,
    group_relative,
    leave_one_out,
    reinforce_plus_plus,
    token_rewards,
    whiten,
)

quick = settings(max_examples=40, deadline=None)


def of(*numbers) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@st.composite
def responses(draw) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values and a mask, [B, T], with anything in the masked entries."""
    num_rows, length = draw(st.integers(1, 4)), draw(st.integers(0, 7))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    mask = torch.tensor(rng.random((num_rows, length)) < 0.6)
    garbage = draw(st.sampled_from([math.nan, math.inf, -math.inf, 1e9]))
    rewards, values = torch.tensor(rng.normal(size=(2, num_rows, length)))
    return rewards.where(mask, garbage), values.where(mask, garbage), mask


def test_gae_matches_a_hand_computed_example():
    rewards, values = of([0.0, 0.0, 1.0]), of([0.5, 0.4, 0.6])
    advantages, returns = gae(rewards, values, torch.ones(1, 3), gamma=0.9, lam=0.5)
    # delta_2 = 1 - 0.6 = 0.4; delta_1 = 0.9*0.6 - 0.4 = 0.14; delta_0 = 0.9*0.4 - 0.5 = -0.14
    # A_2 = 0.4; A_1 = 0.14 + 0.45*0.4 = 0.32; A_0 = -0.14 + 0.45*0.32 = 0.004
    torch.testing.assert_close(advantages, of([0.004, 0.32, 0.4]))
    torch.testing.assert_close(returns, of([0.504, 0.72, 1.0]))


def test_gae_with_lambda_one_and_no_discount_is_the_return_minus_the_value():
    rewards, values = of([-0.1, -0.2, 1.0]), of([0.3, 0.2, 0.1])
    advantages, returns = gae(rewards, values, torch.ones(1, 3), gamma=1.0, lam=1.0)
    torch.testing.assert_close(returns, of([0.7, 0.8, 1.0]))
    torch.testing.assert_close(advantages, returns - values)


def test_gae_is_carried_across_what_a_tool_said():
    # Actions 0 and 2 only: A_2 = 1 - 0.3 = 0.7; A_0 = 0.9*0.3 - 0.2 + 0.72*0.7 = 0.574
    advantages, returns = gae(
        of([0.0, 5.0, 1.0, 5.0]),
        of([0.2, 7.0, 0.3, 7.0]),
        torch.tensor([[1, 0, 1, 0]]),
        gamma=0.9,
        lam=0.8,
    )
    torch.testing.assert_close(advantages, of([0.574, 0.0, 0.7, 0.0]))
    torch.testing.assert_close(returns, of([0.774, 0.0, 1.0, 0.0]))


@given(batch=responses(), gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([1.0, 0.7, 0.0]))
@quick
def test_gae_and_returns_equal_those_with_the_masked_tokens_removed(batch, gamma, lam):
    rewards, values, mask = batch
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    discounted = discounted_returns(rewards, mask, gamma=gamma)
    for row, kept in enumerate(mask):
        num_steps = int(kept.sum())
        r, v = rewards[row][kept].tolist(), [*values[row][kept].tolist(), 0.0]
        deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(num_steps)]
        for t, place in enumerate(kept.nonzero().flatten().tolist()):
            rest = range(num_steps - t)
            advantage = sum((gamma * lam) ** k * deltas[t + k] for k in rest)
            assert advantages[row, place].item() == pytest.approx(advantage)
            assert returns[row, place].item() == pytest.approx(advantage + v[t])
            expected = sum(gamma**k * r[t + k] for k in rest)
            assert discounted[row, place].item() == pytest.approx(expected)
    for tensor in (advantages, returns, discounted):
        assert not tensor[~mask].any()


def test_returns_are_discounted_by_action():
    # Actions 0, 1 and 3: 4; 2 + 0.5*4 = 4; 1 + 0.5*4 = 3
    returns = discounted_returns(of([1, 2, 9, 4]), torch.tensor([[1, 1, 0, 1]]), gamma=0.5)
    assert returns.tolist() == [[3, 4, 0, 4]]


def test_the_reward_lands_on_the_last_action_token():
    mask = torch.tensor(
        [[True, True, False], [True, True, True], [True, False, True], [True, False, False]]
    )
    penalties = torch.where(mask, 0.5, math.nan).double()
    rewards = token_rewards(of(2, 3, 4, 5), penalties, mask)
    assert rewards.tolist() == [[-0.5, 1.5, 0], [-0.5, -0.5, 2.5], [-0.5, 0, 3.5], [4.5, 0, 0]]


def test_a_response_without_action_tokens_is_paid_nothing():
    rewards = token_rewards(of(math.nan, 1), torch.zeros(2, 2), torch.tensor([[0, 0], [0, 1]]))
    assert rewards.tolist() == [[0, 0], [0, 1]]


@given(batch=responses())
@quick
def test_no_reward_is_lost_and_none_falls_on_a_masked_token(batch):
    penalties, _, mask = batch
    final = torch.arange(1, len(mask) + 1).double()
    rewards = token_rewards(final, penalties, mask)
    assert not rewards[~mask].any()
    total = (final * mask.any(1) - torch.where(mask, penalties, 0.0).sum(1)).tolist()
    assert rewards.sum(1).tolist() == pytest.approx(total)


def test_whitening_counts_only_what_is_not_masked():
    values = torch.tensor([[1.0, 3.0, math.nan], [5.0, 7.0, math.inf]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    # Mean 4, variance (9 + 1 + 1 + 9) / 4 = 5
    expected = [[-3 / 5**0.5, -1 / 5**0.5, 0], [1 / 5**0.5, 3 / 5**0.5, 0]]
    torch.testing.assert_close(whiten(values, mask), torch.tensor(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whitening_equal_values_or_one_alone_gives_zero(dtype):
    values = torch.full((3, 7), 1e6 + 0.1, dtype=dtype)
    assert not whiten(values, torch.ones(3, 7)).any()
    one = torch.zeros(3, 7)
    one[1, 2] = 1
    assert not whiten(torch.randn(3, 7, dtype=dtype), one).any()
    assert whiten(values, torch.zeros(3, 7)).tolist() == torch.zeros(3, 7).tolist()


def test_whitening_is_exact_for_values_far_from_zero():
    values = torch.tensor([[4096.0, 4096.0009765625] * 500])
    white = whiten(values, torch.ones_like(values))
    # Half of the values one step below the mean, half above; float32 sums would lose that.
    assert white[0, :2].tolist() == pytest.approx([-1, 1], abs=1e-4)


def test_a_nan_is_not_hidden():
    rewards, groups = of(1, math.nan, 2, 5), torch.tensor([0, 0, 0, 1])
    assert whiten(rewards, torch.ones(4)).isnan().all()
    for without in (False, True):
        for by_std in (False, True):
            advantages = group_relative(
                rewards, groups, normalise_by_std=by_std, leave_one_out=without
            )
            assert advantages.isnan().tolist() == [True, True, True, False]
    assert token_rewards(of(math.nan), of([0.0]), torch.ones(1, 1)).isnan().all()


def test_reinforce_plus_plus_whitens_returns_over_the_whole_batch():
    rewards, mask = of([0, 2, 9], [1, 9, 3]), torch.tensor([[1, 1, 0], [1, 0, 1]])
    # Returns 1, 2 and 2.5, 3: mean 2.125, variance (1.265625 + .015625 + .140625 + .765625) / 4
    std = 0.546875**0.5
    expected = of([-1.125 / std, -0.125 / std, 0], [0.375 / std, 0, 0.875 / std])
    torch.testing.assert_close(reinforce_plus_plus(rewards, mask, gamma=0.5), expected)


def test_grpo_matches_a_hand_computed_example():
    rewards, groups = of(1, 0, 0, 1, 5, 5), torch.tensor([0, 0, 0, 0, 1, 1])
    centred = group_relative(rewards, groups, normalise_by_std=False)
    assert centred.tolist() == [0.5, -0.5, -0.5, 0.5, 0.0, 0.0]
    # The sample deviation is sqrt(4 * 0.25 / 3)
    scaled = group_relative(rewards, groups, normalise_by_std=True, epsilon=0.0)
    up = 0.5 / (1 / 3) ** 0.5
    assert scaled.tolist() == pytest.approx([up, -up, -up, up, 0, 0], abs=1e-12)


def test_leave_one_out_estimators_match_a_hand_computed_example():
    rewards, groups = of(1, 2, 6, 3, 7), torch.tensor([0, 0, 0, 1, 1])
    # Against (2+6)/2, (1+6)/2, (1+2)/2; 7 and 3
    differences = [-3, -1.5, 4.5, -4, 4]
    assert leave_one_out(rewards, groups).tolist() == differences
    plain = group_relative(rewards, groups, normalise_by_std=False, leave_one_out=True)
    assert plain.tolist() == differences
    # Deviations of two numbers are |a - b| / sqrt(2): 4, 5 and 1 over that. One number has none.
    scaled = group_relative(rewards, groups, normalise_by_std=True, leave_one_out=True, epsilon=0.0)
    root = 2**0.5
    assert scaled.tolist() == pytest.approx([-3 / 4 * root, -1.5 / 5 * root, 4.5 * root, -4, 4])


def test_one_success_among_equal_failures_is_not_blown_up_by_leaving_it_out():
    rewards, groups = of(0.1, 0.1, 0.1, 1.1), torch.zeros(4, dtype=torch.int64)
    scaled = group_relative(rewards, groups, normalise_by_std=True, leave_one_out=True)
    assert scaled[3].item() == pytest.approx(1.0)
    # The others of a failure are 0.1, 0.1 and 1.1: mean 0.4333, deviation 0.57735
    assert scaled[:3].tolist() == pytest.approx([-0.57735] * 3, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_groups_of_one_and_of_equal_rewards_have_no_advantage(dtype):
    rewards = torch.tensor([0.1, 3.0, 0.1, 0.1, 1e6 / 3, 1e6 / 3, 1e6 / 3], dtype=dtype)
    groups = torch.tensor([7, -2, 7, 7, 9, 9, 9])
    zeros = [0.0] * 7
    assert leave_one_out(rewards, groups).tolist() == zeros
    assert group_centred(rewards, groups).tolist() == zeros
    for by_std in (False, True):
        for without in (False, True):
            advantages = group_relative(
                rewards, groups, normalise_by_std=by_std, leave_one_out=without
            )
            assert advantages.tolist() == zeros
            assert advantages.dtype == dtype


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    seed=st.integers(0, 2**32 - 1),
    binary=st.booleans(),
)
@quick
def test_group_estimators_equal_plain_loops_in_any_order(sizes, seed, binary):
    rng = np.random.default_rng(seed)
    ids = rng.choice(np.arange(-50, 50), size=len(sizes), replace=False)
    groups = rng.permutation(np.repeat(ids, sizes))
    rewards = rng.integers(0, 2, len(groups)) * 0.7 if binary else rng.normal(size=len(groups))
    expected: dict[str, list[float]] = {"centred": [], "std": [], "others": [], "others_std": []}
    for row, group in enumerate(groups):
        members = [rewards[k] for k in range(len(groups)) if groups[k] == group]
        others = [rewards[k] for k in range(len(groups)) if groups[k] == group and k != row]
        centred = rewards[row] - sum(members) / len(members)
        against = rewards[row] - sum(others) / len(others) if others else 0.0
        std = np.std(members, ddof=1) if len(members) > 1 else 0.0
        others_std = np.std(others, ddof=1) if len(set(others)) > 1 else 0.0
        flat = len(set(members)) == 1
        expected["centred"].append(0.0 if flat else centred)
        expected["std"].append(0.0 if flat else centred / (std + 1e-6))
        expected["others"].append(0.0 if flat else against)
        scaled = against / (others_std + 1e-6) if others_std else against
        expected["others_std"].append(0.0 if flat else scaled)
    r, g = torch.tensor(rewards), torch.tensor(groups)
    actual = {
        "centred": group_centred(r, g),
        "std": group_relative(r, g, normalise_by_std=True),
        "others": leave_one_out(r, g),
        "others_std": group_relative(r, g, normalise_by_std=True, leave_one_out=True),
    }
    for name, numbers in expected.items():
        assert actual[name].tolist() == pytest.approx(numbers, abs=1e-10), name


def test_remax_compares_with_the_greedy_response():
    assert against_baseline(of(1, 0, 2), of(0.5, 0.5, 2)).tolist() == [0.5, -0.5, 0]
