"""The critic's loss by hand, and how well it explains the returns."""

import math

import pytest
import torch
from torch import Tensor

from stages.algorithms.loss import Counts, Loss, Tokens
from stages.algorithms.value_loss import explained_variance, value_loss

ONE = Counts(tokens=1, sequences=1)


def one(value: Tensor | float, old: float, target: float, clip: float | None = 0.2) -> Loss:
    values = value if isinstance(value, Tensor) else torch.tensor([[value]], dtype=torch.float64)
    tokens = Tokens.padded(torch.ones(1, 1))
    return value_loss(
        values, torch.tensor([[old]]), torch.tensor([[target]]), tokens, ONE, clip=clip
    )


def test_the_worse_of_the_value_and_the_clipped_value_counts():
    # 1.0 is held at 0.2, though it is right
    result = one(1.0, 0.0, 1.0)
    assert result.value.item() == pytest.approx(0.5 * 0.8**2)
    assert result.metrics["value_clip_fraction"].value.item() == 1
    # Held at 0.2 it would be better: what it says counts
    result = one(1.0, 0.0, 0.0)
    assert result.value.item() == pytest.approx(0.5)
    assert result.metrics["value_clip_fraction"].value.item() == 0
    assert one(1.0, 0.0, 1.0, clip=None).value.item() == 0


@pytest.mark.parametrize(("target", "slope"), [(1.0, 0.0), (0.0, 0.5), (3.0, 0.0)])
def test_a_clipped_value_has_no_gradient(target, slope):
    value = torch.tensor([[0.5]], dtype=torch.float64, requires_grad=True)
    one(value, 0.0, target).value.backward()
    assert value.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize("value", [0.25, -0.25, 0.0])
def test_a_value_on_the_bound_is_not_clipped(value):
    values = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    result = one(values, 0.0, 2.0, clip=0.25)
    result.value.backward()
    assert values.grad.item() == value - 2.0
    assert result.metrics["value_clip_fraction"].value.item() == 0


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant():
    returns, mask = torch.tensor([[1.0, 2.0, math.nan]]), torch.tensor([[1.0, 1.0, 0.0]])
    assert explained_variance(returns, returns, mask) == pytest.approx(1.0)
    assert explained_variance(torch.full((1, 3), 4.0), returns, mask) == pytest.approx(0.0)
    # Errors -1 and 1: variance 1 over the returns' 0.25
    assert explained_variance(torch.tensor([[2.0, 1.0, 0.0]]), returns, mask) == pytest.approx(-3.0)


def test_returns_that_do_not_vary_explain_nothing():
    same = torch.ones(1, 3)
    assert explained_variance(same, same, torch.ones(1, 3)) == 0.0
    assert explained_variance(same, same, torch.zeros(1, 3)) == 0.0
