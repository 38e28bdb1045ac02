"""One step of a learner, number by number."""

import math

import pytest
import torch

from stages.engines.training.learner import Optimization
from stages.engines.training.optimizer import Learner

RATE, DECAY, BETAS, EPSILON = 0.01, 0.3, (0.8, 0.9), 1e-8
GRADIENTS = [[0.5, -2.0, 0.0], [0.25, 1.0, -3.0]]


class Two(torch.nn.Module):
    """Weights in two tensors, of two sizes."""

    def __init__(self):
        super().__init__()
        self.one = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
        self.two = torch.nn.Parameter(torch.tensor([4.0], dtype=torch.float64))


def learner(**options):
    how = {"learning_rate": RATE, "max_grad_norm": 1e9, "betas": BETAS, **options}
    return Learner(Two(), Optimization(**how))


def give(learner, gradients):
    one, two = learner.parameters()
    one.grad, two.grad = (torch.tensor(part, dtype=torch.float64) for part in gradients)


def numbers(learner):
    return [float(x) for parameter in learner.parameters() for x in parameter.detach()]


def test_weights_decay_apart_from_the_moments():
    """AdamW (Loshchilov and Hutter 2019): the decay never passes through the moments."""
    found = learner(weight_decay=DECAY)
    expected, means, squares = numbers(found), [0.0] * 3, [0.0] * 3
    for step, (gradients, factor) in enumerate(zip(GRADIENTS, (1.0, 0.5), strict=True), 1):
        give(found, (gradients[:2], gradients[2:]))
        found.step(factor)
        rate = RATE * factor
        for i, gradient in enumerate(gradients):
            means[i] = BETAS[0] * means[i] + (1 - BETAS[0]) * gradient
            squares[i] = BETAS[1] * squares[i] + (1 - BETAS[1]) * gradient**2
            mean = means[i] / (1 - BETAS[0] ** step)
            spread = math.sqrt(squares[i] / (1 - BETAS[1] ** step)) + EPSILON
            expected[i] -= rate * DECAY * expected[i] + rate * mean / spread
        assert numbers(found) == pytest.approx(expected, rel=1e-12)
    moments = found.moments()
    kept = [float(x) for name in ("one", "two") for x in moments[f"exp_avg.{name}"]]
    assert kept == pytest.approx(means, rel=1e-12)


def test_a_gradient_of_zero_leaves_decay_alone():
    found = learner(weight_decay=DECAY)
    before = numbers(found)
    give(found, ([0.0, 0.0], [0.0]))
    found.step(1.0)
    assert numbers(found) == pytest.approx([x * (1 - RATE * DECAY) for x in before], rel=1e-12)


@pytest.mark.parametrize(("most", "scale"), [(1.0, 1 / 13), (13.5, 1.0)])
def test_the_norm_that_is_clipped_is_of_all_weights_together(most, scale):
    found = learner(max_grad_norm=most)
    give(found, ([3.0, -4.0], [12.0]))
    assert found.clip_gradients() == pytest.approx(13.0)
    clipped = [float(x) for parameter in found.parameters() for x in parameter.grad]
    assert clipped == pytest.approx([3 * scale, -4 * scale, 12 * scale], rel=1e-5)
