"""Policy losses by hand, and the edges of the published formulas."""

import math

import pytest
import torch
from torch import Tensor

from stages.algorithms.loss import Counts, Loss, LossAggregation, Tokens
from stages.algorithms.policy_loss import Objective, entropy_bonus, policy_loss
from stages.contracts.objectives import Aggregation, PolicyObjective

CLIP, GSPO = PolicyObjective.CLIP, PolicyObjective.GSPO
CISPO, GRADIENT = PolicyObjective.CISPO, PolicyObjective.GRADIENT
TOKEN_MEAN = LossAggregation(Aggregation.TOKEN_MEAN)


def of(*numbers) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def losses(
    kind: PolicyObjective,
    ratios: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.3,
    dual_clip: float | None = None,
    how: Aggregation = Aggregation.SEQUENCE_MEAN_TOKEN_SUM,
    old: float = -3.0,
) -> tuple[Loss, Tensor]:
    """The loss (by default the sum over tokens) of [B, T] ratios, and its gradient."""
    old_logprobs = torch.full_like(ratios, old)
    logprobs = (old_logprobs + ratios.log()).requires_grad_()
    result = policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        Tokens.padded(torch.ones_like(ratios)),
        Counts(ratios.numel(), len(ratios)),
        Objective(kind, clip_low, clip_high, dual_clip, LossAggregation(how, 1 / len(ratios))),
    )
    (gradient,) = torch.autograd.grad(result.value, logprobs)
    return result, gradient


def fractions(result: Loss) -> tuple[float, ...]:
    names = [name for name in ("low", "high", "dual") if f"clip_fraction_{name}" in result.metrics]
    return tuple(result.metrics[f"clip_fraction_{name}"].value.item() for name in names)


def test_the_loss_is_clipped_only_where_that_makes_it_worse():
    result, gradient = losses(CLIP, of([0.5, 0.5, 2.0, 2.0]), of([1.0, -1.0, 3.0, -1.0]))
    # min(0.5, 0.8) + min(-0.5, -0.8) + 3 min(2, 1.3) + min(-2, -1.3)
    assert result.value.item() == pytest.approx(-(0.5 - 0.8 + 3 * 1.3 - 2.0))
    assert gradient[0].tolist() == pytest.approx([-0.5, 0, 0, 2.0])
    assert fractions(result) == (1, 1)
    extremes = [result.metrics[name].value.item() for name in ("ratio_min", "ratio_max")]
    assert extremes == pytest.approx([0.5, 2.0])
    # r - 1 - log r: 0.5 - 1 + log 2, twice, and 2 - 1 - log 2, twice
    assert result.metrics["approx_kl"].value.item() == pytest.approx(1.0)


def test_each_side_has_its_own_bound():
    ratios, advantages = of([1.25, 0.75]), of([1.0, -1.0])
    assert fractions(losses(CLIP, ratios, advantages, clip_low=0.3, clip_high=0.2)[0]) == (0, 1)
    assert fractions(losses(CLIP, ratios, advantages, clip_low=0.2, clip_high=0.3)[0]) == (1, 0)


def test_a_bad_token_that_became_likely_costs_at_most_the_dual_clip():
    ratios, advantages = of([5.0, 5.0, 2.9, 0.1]), of([-2.0, 2.0, -2.0, -2.0])
    result, gradient = losses(CLIP, ratios, advantages, dual_clip=3.0)
    # 2 min(5, 3), -2 min(5, 1.3), 2 * 2.9, 2 * 0.8
    assert result.value.item() == pytest.approx(6.0 - 2.6 + 5.8 + 1.6)
    assert gradient[0].tolist() == pytest.approx([0, 0, 5.8, 0])
    assert fractions(result) == (1, 1, 1)
    without, _ = losses(CLIP, ratios, advantages)
    assert without.value.item() == pytest.approx(10.0 - 2.6 + 5.8 + 1.6)
    assert "clip_fraction_dual" not in without.metrics


@pytest.mark.parametrize("kind", [CLIP, GSPO, CISPO])
@pytest.mark.parametrize(("ratio", "advantage"), [(0.5, -1.0), (1.5, 1.0)])
def test_a_ratio_on_the_bound_is_not_clipped(kind, ratio, advantage):
    old = torch.zeros(1, 1, dtype=torch.float64)
    logprobs = of([math.log(ratio)]).requires_grad_()
    bound = abs(logprobs.detach().exp().item() - 1)
    result = policy_loss(
        logprobs,
        old,
        of([advantage]),
        Tokens.padded(torch.ones(1, 1)),
        Counts(1, 1),
        Objective(kind, bound, bound, None, TOKEN_MEAN),
    )
    result.value.backward()
    assert logprobs.grad.item() == pytest.approx(-advantage * ratio)
    assert fractions(result) == (0, 0)


@pytest.mark.parametrize("kind", PolicyObjective)
def test_no_advantage_no_loss_and_no_gradient(kind):
    result, gradient = losses(kind, of([0.1, 1.0, 9.0]), of([0.0, 0.0, 0.0]), dual_clip=3.0)
    assert result.value.item() == 0
    assert not gradient.any()


@pytest.mark.parametrize("dual_clip", [None, 2.0])
def test_gspo_of_single_tokens_is_the_token_clip(dual_clip):
    ratios, advantages = of([0.5], [0.5], [2.0], [2.5], [1.1]), of([1], [-1], [3], [-1], [-2])
    ours, our_gradient = losses(GSPO, ratios, advantages, dual_clip=dual_clip)
    theirs, their_gradient = losses(CLIP, ratios, advantages, dual_clip=dual_clip)
    torch.testing.assert_close(ours.value, theirs.value)
    torch.testing.assert_close(our_gradient, their_gradient)
    assert ours.metrics.keys() == theirs.metrics.keys()
    for name, metric in ours.metrics.items():
        torch.testing.assert_close(metric.value, theirs.metrics[name].value)


def test_gspo_has_the_gradient_of_the_length_normalised_ratio():
    ratios, advantages = of([0.9, 1.3, 1.1], [1.2, 0.8, 0.7]), of([2.0] * 3, [-1.0] * 3)
    result, gradient = losses(
        GSPO, ratios, advantages, how=Aggregation.SEQUENCE_MEAN_TOKEN_MEAN, clip_low=0.5
    )
    logprobs = ratios.log().requires_grad_()
    direct = -(logprobs.mean(1).exp() * advantages[:, 0]).mean()
    torch.testing.assert_close(result.value, direct)
    torch.testing.assert_close(gradient, torch.autograd.grad(direct, logprobs)[0])
    # The geometric means: (0.9 * 1.3 * 1.1)^(1/3) and (1.2 * 0.8 * 0.7)^(1/3)
    means = [1.287 ** (1 / 3), 0.672 ** (1 / 3)]
    assert result.metrics["ratio_max"].value.item() == pytest.approx(means[0])
    assert result.metrics["ratio_min"].value.item() == pytest.approx(means[1])


def test_gspo_clips_whole_responses():
    ratios = of([2.0, 2.0, 0.9], [2.0, 0.5, 1.0])
    result, gradient = losses(GSPO, ratios, torch.ones(2, 3, dtype=torch.float64))
    # (2 * 2 * 0.9)^(1/3) = 1.53 is clipped, also for the token at 0.9; the other's ratio is 1
    assert result.value.item() == pytest.approx(-3 * 1.3 - 3)
    assert gradient.tolist() == [[0, 0, 0], pytest.approx([-1, -1, -1])]
    assert fractions(result) == (0, 3)


def test_gspo_allows_an_advantage_for_each_token():
    _, gradient = losses(GSPO, of([2.0, 0.5]), of([1.0, -3.0]))
    assert gradient[0].tolist() == pytest.approx([-1.0, 3.0])


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    result, gradient = losses(CISPO, of([0.5, 1.0, 2.0, 2.0]), of([1, 1, 1, -2]), old=-1.0)
    # Weights 0.8, 1, 1.3, 1.3 on A log p
    logs = [math.log(ratio) - 1 for ratio in (0.5, 1.0, 2.0, 2.0)]
    expected = -(0.8 * logs[0] + logs[1] + 1.3 * logs[2] - 2.6 * logs[3])
    assert result.value.item() == pytest.approx(expected)
    assert gradient[0].tolist() == pytest.approx([-0.8, -1, -1.3, 2.6])
    assert fractions(result) == (1, 2)


@pytest.mark.parametrize("clip_low", [1.0, 5.0])
def test_cispo_may_have_no_lower_bound(clip_low):
    result, gradient = losses(CISPO, of([0.01]), of([1.0]), clip_low=clip_low)
    assert gradient.item() == pytest.approx(-0.01)
    assert fractions(result) == (0, 0)


def test_the_plain_gradient_has_no_ratio():
    result, gradient = losses(GRADIENT, of([0.1, 9.0]), of([2.0, -1.0]), old=0.0)
    assert gradient[0].tolist() == [-2.0, 1.0]
    assert result.value.item() == pytest.approx(-2 * math.log(0.1) + math.log(9.0))
    assert fractions(result) == (0, 0)


def test_aggregations_by_hand():
    old = torch.zeros(2, 3, dtype=torch.float64)
    tokens = Tokens.padded(torch.tensor([[1, 1, 1], [0, 1, 0]]))
    advantages = of([-1, -2, -3], [9, -12, 9])
    # Ratios are 1. 18 over 4 tokens; 2 and 12 over 2 responses; 18 over 8 over 2 responses
    for how, expected in zip(Aggregation, [4.5, 7.0, 1.125], strict=True):
        objective = Objective(CLIP, 0.2, 0.2, None, LossAggregation(how, 8.0))
        result = policy_loss(old, old, advantages, tokens, tokens.counts(), objective)
        assert result.value.item() == pytest.approx(expected)


def test_weights_have_no_gradient_of_their_own():
    logprobs = of([-1.0, -2.0]).requires_grad_()
    result = policy_loss(
        logprobs,
        logprobs.detach(),
        of([1.0, 1.0]),
        Tokens.padded(torch.ones(1, 2)),
        Counts(2, 1),
        Objective(CLIP, 0.2, 0.2, None, TOKEN_MEAN),
        weights=2 + logprobs,
    )
    result.value.backward()
    assert logprobs.grad[0].tolist() == pytest.approx([-0.5, 0.0])


@pytest.mark.parametrize("kind", PolicyObjective)
@pytest.mark.parametrize("away", [-1e4, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_far_log_ratios_give_finite_losses_and_gradients(kind, away, advantage):
    logprobs = torch.tensor([[away, away]], requires_grad=True)
    result = policy_loss(
        logprobs,
        torch.zeros(1, 2),
        torch.full((1, 2), advantage),
        Tokens.padded(torch.ones(1, 2)),
        Counts(2, 1),
        Objective(kind, 0.2, 0.2, None, TOKEN_MEAN),
    )
    result.value.backward()
    assert logprobs.grad.isfinite().all()
    for metric in result.metrics.values():
        assert metric.value.isfinite()


@pytest.mark.parametrize("kind", PolicyObjective)
@pytest.mark.parametrize("shape", [(0, 0), (2, 3)])
def test_a_micro_batch_without_tokens_adds_nothing(kind, shape):
    nothing = torch.full(shape, math.nan, dtype=torch.float64, requires_grad=True)
    tokens = Tokens.padded(torch.zeros(shape))
    objective = Objective(kind, 0.2, 0.2, 3.0, TOKEN_MEAN)
    result = policy_loss(nothing, nothing, nothing, tokens, Counts(7, 3), objective)
    result.value.backward()
    assert not nothing.grad.any()
    shares = {name: metric.value.item() for name, metric in result.metrics.items()}
    assert (shares.pop("ratio_min"), shares.pop("ratio_max")) == (1, 1)
    assert not any(shares.values())


def test_the_entropy_bonus_rewards_entropy():
    tokens = Tokens.padded(torch.tensor([[1, 1], [1, 0]]))
    entropies = of([1.0, 3.0], [5.0, math.nan])
    how = LossAggregation(Aggregation.SEQUENCE_MEAN_TOKEN_MEAN)
    result = entropy_bonus(entropies, tokens, tokens.counts(), how)
    # Means 2 and 5 of two responses; 9 over three tokens
    assert result.value.item() == -3.5
    assert result.metrics["entropy"].share(tokens.counts()).item() == 3.0
