"""Groups that can teach something, and those that cannot."""

import pytest
import torch

from stages.algorithms.groups import refill, share_of_zero_variance, zero_variance

REWARDS = torch.tensor([0.1, 1.0, 0.1, 0.0, 0.1, 5.0, 0.1])
GROUPS = torch.tensor([30, -4, 30, -4, 30, 8, 30])


def test_equal_rewards_and_groups_of_one_have_no_variance():
    assert zero_variance(REWARDS, GROUPS).tolist() == [True, False, True, False, True, True, True]


def test_the_smallest_difference_is_variance():
    rewards = torch.tensor([1.0, 1.0 + 2**-23])
    assert zero_variance(rewards, torch.zeros(2, dtype=torch.int64)).tolist() == [False, False]


def test_the_share_is_one_of_groups_and_not_of_rows():
    assert share_of_zero_variance(REWARDS, GROUPS) == pytest.approx(2 / 3)
    nothing = torch.zeros(0)
    assert share_of_zero_variance(nothing, nothing.long()) == 0.0


def test_refilling_takes_the_first_varied_prompts_in_the_order_drawn():
    order = ["d", "a", "c", "b", "a", "e"]
    assert refill(order, {"a", "b", "c"}, 2) == ["a", "c"]
    assert refill(order, {"a", "b", "e"}, 3) == ["a", "b", "e"]
    assert refill(order, {"e", "unknown"}, 3) == ["e"]
    assert refill(order, {"a"}, 0) == []
