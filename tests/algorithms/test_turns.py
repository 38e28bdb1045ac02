"""Credit over turns against numbers worked out by hand, of episodes of unequal length."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.algorithms.advantages import (
    discounted_returns,
    gae,
    group_relative,
    leave_one_out,
)
from stages.algorithms.turns import (
    compared_by_turn,
    discounts,
    over_tokens,
    turn_numbers,
    turn_returns,
    turn_rewards,
)
from tests.algorithms.test_advantages import of, quick

# Three episodes: turns of two, one and one tokens with an observation after the first; of one and
# one; of one. 9 is what nobody may count.
MASK = of([1, 1, 0, 1, 1, 0], [1, 0, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0])
ENDS = of([0, 1, 0, 1, 1, 0], [1, 0, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0])
PAID = of([-0.5, 1, 0, 0, 4, 0], [2, 0, 0, 3, 0, 0], [8, 0, 0, 0, 0, 0])


def test_a_token_belongs_to_the_turn_that_ends_at_or_after_it():
    numbers = turn_numbers(ENDS)[MASK > 0].tolist()
    assert numbers == [0, 0, 1, 2, 0, 1, 0]


def test_a_turn_is_paid_what_its_tokens_are():
    assert turn_rewards(PAID, ENDS).tolist() == [[0.5, 0, 4], [2, 3, 0], [8, 0, 0]]


def test_returns_are_discounted_by_turn_and_not_by_token():
    # 0.5 + 0.5*0 + 0.25*4 = 1.5; 0 + 0.5*4 = 2; 2 + 0.5*3 = 3.5
    returns = turn_returns(of([0.5, 0, 4], [2, 3, 0], [8, 0, 0]), discount=0.5)
    assert returns.tolist() == [[1.5, 2, 4], [3.5, 3, 0], [8, 0, 0]]


RETURNS = of([1.5, 2, 4], [3.5, 3, 0], [8, 0, 0])


def test_a_turn_is_compared_with_the_same_turn_of_those_that_have_one():
    # Turn 0: 1.5 - (3.5+8)/2, 3.5 - (1.5+8)/2, 8 - (1.5+3.5)/2. Turn 1: 2 - 3 and 3 - 2, without
    # the third episode. Turn 2 has nothing to be compared with.
    found = compared_by_turn(RETURNS, ENDS, torch.tensor([5, 5, 5]), leave_one_out)
    torch.testing.assert_close(found, of([-4.25, -1, 0], [-1.25, 1, 0], [5.5, 0, 0]))


def test_the_deviation_is_that_of_the_same_turns():
    def compare(returns, groups):
        return group_relative(returns, groups, normalise_by_std=True, epsilon=0.0)

    found = compared_by_turn(RETURNS, ENDS, torch.tensor([5, 5, 5]), compare)
    # Turn 0: mean 13/3, variance (17/6)^2 + (5/6)^2 + (22/6)^2 over 2; turn 1: 0.5 / sqrt(0.5).
    deviation = ((17**2 + 5**2 + 22**2) / 36 / 2) ** 0.5
    torch.testing.assert_close(
        found,
        of(
            [-17 / 6 / deviation, -(0.5**0.5), 0],
            [-5 / 6 / deviation, 0.5**0.5, 0],
            [22 / 6 / deviation, 0, 0],
        ),
    )


def test_turns_of_another_group_are_not_looked_at():
    found = compared_by_turn(RETURNS, ENDS, torch.tensor([1, 0, 1]), leave_one_out)
    torch.testing.assert_close(found, of([-6.5, 0, 0], [0, 0, 0], [6.5, 0, 0]))


def test_each_own_token_has_its_turns_value():
    values = over_tokens(of([1, 2, 3], [4, 5, 9], [6, 9, 9]), ENDS, MASK)
    assert values.tolist() == [[1, 1, 0, 2, 3, 0], [4, 0, 0, 5, 0, 0], [6, 0, 0, 0, 0, 0]]


def test_the_critics_advantages_are_discounted_again_where_a_turn_ends():
    # Own tokens 0, 1 | 3: gamma 0.9 after token 0, 0.9 * 0.5 after token 1, and lambda 0.5.
    mask, ends = of([1, 1, 0, 1]), of([0, 1, 0, 1])
    gamma = discounts(ends, gamma=0.9, turn_discount=0.5)
    rewards, values = of([0, 1, 0, 2]), of([0.5, 0.4, 7, 0.6])
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=0.5)
    # A_3 = 2 - 0.6 = 1.4; A_1 = 1 + 0.45*0.6 - 0.4 + 0.225*1.4 = 1.185;
    # A_0 = 0.9*0.4 - 0.5 + 0.45*1.185 = 0.39325
    torch.testing.assert_close(advantages, of([0.39325, 1.185, 0, 1.4]))
    torch.testing.assert_close(returns, of([0.89325, 1.585, 0, 2.0]))
    # 2; 1 + 0.45*2 = 1.9; 0.9*1.9 = 1.71
    found = discounted_returns(rewards, mask, gamma=gamma)
    torch.testing.assert_close(found, of([1.71, 1.9, 0, 2.0]))


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=5))
@quick
def test_one_reward_at_the_end_of_equally_many_turns_is_that_of_the_response(rewards):
    """Then nothing differs from what the method does with whole responses."""
    ends = of([0, 1, 0, 1]).expand(len(rewards), -1)
    final = torch.tensor(rewards, dtype=torch.float64)
    paid = torch.zeros(len(rewards), 2, dtype=torch.float64)
    paid[:, 1] = final
    groups = torch.zeros(len(rewards), dtype=torch.long)
    found = compared_by_turn(turn_returns(paid, discount=1.0), ends, groups, leave_one_out)
    expected = leave_one_out(final, groups)
    for turn in range(2):
        assert found[:, turn].tolist() == pytest.approx(expected.tolist())
