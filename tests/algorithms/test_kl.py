"""KL estimates on a distribution small enough to sum over, and the controller by hand."""

import math
import statistics

import pytest
import torch
from torch import Tensor

from stages.algorithms.kl import (
    MAX_LOG_RATIO,
    k1,
    k2,
    k3,
    kl_estimate,
    kl_loss,
    mean_kl,
    next_kl_coef,
    reported_kl,
)
from stages.algorithms.loss import Counts, LossAggregation, Tokens
from stages.contracts.objectives import Aggregation, KlEstimator

LOGITS = torch.tensor([0.9, -0.4, 0.1, -1.3], dtype=torch.float64)
OLD = torch.tensor([0.2, 0.5, -0.3, -0.2], dtype=torch.float64).log_softmax(0)
REFERENCE = torch.tensor([-0.6, 0.7, 0.4, 0.0], dtype=torch.float64).log_softmax(0)


def gradient_of_the_kl() -> Tensor:
    logits = LOGITS.clone().requires_grad_()
    policy = logits.log_softmax(0)
    (slope,) = torch.autograd.grad((policy.exp() * (policy - REFERENCE)).sum(), logits)
    return slope


def expected_gradient(kind: KlEstimator, sampler: Tensor | None) -> Tensor:
    """Over tokens drawn from `sampler`, or from the policy itself: a sum over all of them."""
    logits = LOGITS.clone().requires_grad_()
    policy = logits.log_softmax(0)
    drawn = (policy if sampler is None else sampler).detach().exp()
    (slope,) = torch.autograd.grad(
        (drawn * kl_estimate(kind, policy, REFERENCE, sampler)).sum(), logits
    )
    return slope


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("sampler", [None, OLD])
def test_the_unbiased_estimate_has_the_gradient_of_the_kl_whoever_sampled(sampler):
    slope = expected_gradient(KlEstimator.K3_UNBIASED, sampler)
    torch.testing.assert_close(slope, gradient_of_the_kl(), rtol=1e-12, atol=1e-12)


def test_the_other_estimates_have_other_gradients():
    exact = gradient_of_the_kl()
    assert distance(expected_gradient(KlEstimator.K1, None), torch.zeros(4)) < 1e-12
    assert distance(expected_gradient(KlEstimator.K2, None), exact) < 1e-12
    assert distance(expected_gradient(KlEstimator.K3, None), exact) > 0.1
    # k3 descends KL(reference || policy), whose gradient by the logits is policy - reference
    other = LOGITS.softmax(0) - REFERENCE.exp()
    assert distance(expected_gradient(KlEstimator.K3, None), other) < 1e-12
    for kind in (KlEstimator.K1, KlEstimator.K2, KlEstimator.K3):
        assert distance(expected_gradient(kind, OLD), exact) > 0.1


def test_k1_and_k3_are_the_kl_in_the_mean_and_k3_is_never_negative():
    policy = LOGITS.log_softmax(0)
    exact = float((policy.exp() * (policy - REFERENCE)).sum())
    for kind in (KlEstimator.K1, KlEstimator.K3, KlEstimator.K3_UNBIASED):
        mean = (policy.exp() * kl_estimate(kind, policy, REFERENCE)).sum()
        assert float(mean) == pytest.approx(exact, abs=1e-12)
    assert (k3(policy, REFERENCE) > 0).all()
    assert not k3(policy, policy).any()
    mean = (OLD.exp() * kl_estimate(KlEstimator.K3_UNBIASED, policy, REFERENCE, OLD)).sum()
    assert float(mean) == pytest.approx(exact, abs=1e-12)


def test_estimates_by_hand():
    policy, reference = torch.tensor([0.5]).double().log(), torch.tensor([0.25]).double().log()
    assert k1(policy, reference).item() == pytest.approx(math.log(2))
    assert k2(policy, reference).item() == pytest.approx(math.log(2) ** 2 / 2)
    # 0.25 / 0.5 - 1 - log(0.25 / 0.5)
    assert k3(policy, reference).item() == pytest.approx(math.log(2) - 0.5)
    # Sampled with probability 0.2: 2.5 times that
    unbiased = kl_estimate(
        KlEstimator.K3_UNBIASED, policy, reference, torch.tensor([0.2]).double().log()
    )
    assert unbiased.item() == pytest.approx(2.5 * (math.log(2) - 0.5))


@pytest.mark.parametrize("kind", KlEstimator)
@pytest.mark.parametrize("away", [-1e4, 1e4])
def test_far_log_ratios_give_finite_numbers_and_gradients(kind, away):
    logprobs = torch.tensor([[away]], requires_grad=True)
    zero = torch.zeros(1, 1)
    result = kl_loss(
        logprobs,
        zero,
        zero,
        Tokens.padded(torch.ones(1, 1)),
        Counts(1, 1),
        kind,
        LossAggregation(Aggregation.TOKEN_MEAN),
    )
    result.value.backward()
    assert result.value.isfinite()
    assert logprobs.grad.isfinite().all()


def test_the_bound_is_on_the_exponent():
    far = torch.tensor([-1e4], dtype=torch.float64)
    expected = math.exp(MAX_LOG_RATIO) - 1 - MAX_LOG_RATIO
    assert k3(far, torch.zeros(1)).item() == pytest.approx(expected)
    within = torch.tensor([-MAX_LOG_RATIO + 1], dtype=torch.float64)
    expected = math.exp(MAX_LOG_RATIO - 1) - MAX_LOG_RATIO
    assert k3(within, torch.zeros(1)).item() == pytest.approx(expected)


def test_a_policy_that_is_sure_of_what_the_reference_is_not_is_pulled_back():
    """However unlikely the reference finds the token: nothing overflows on that side."""
    logprobs = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    k3(logprobs, torch.tensor([-30.0])).backward()
    assert logprobs.grad.item() == pytest.approx(1 - math.exp(-30))
    assert k3(torch.zeros(1), torch.tensor([-30.0])).item() == pytest.approx(29)


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (6.0, 1.0),
        (6.6, 1 + 0.1 * 64 / 1000),
        (5.4, 1 - 0.1 * 64 / 1000),
        (60.0, 1 + 0.2 * 64 / 1000),
        (0.0, 1 - 0.2 * 64 / 1000),
    ],
)
def test_the_coefficient_follows_the_error_up_to_a_fifth(kl, factor):
    coef = next_kl_coef(0.05, kl, target=6.0, horizon=1000, num_sequences=64)
    assert coef == pytest.approx(0.05 * factor, rel=1e-12)


def test_one_token_against_all_odds_does_not_outweigh_a_step() -> None:
    """2,000 tokens at no distance, and one that the reference finds 10,000 times as likely."""
    logprobs = torch.zeros(2001, dtype=torch.float64)
    logprobs[0] = -math.log(10_000)
    ref = torch.zeros_like(logprobs)
    assert float(k3(logprobs, ref).mean()) > 4
    assert abs(float(reported_kl(logprobs, ref).mean())) < 0.01


@pytest.mark.parametrize("sampled_by", ["policy", "another"])
def test_the_reported_kl_is_the_kl_and_its_error_is_right(sampled_by) -> None:
    """Far apart, where a few rare tokens have most of a k3; drawn often enough to be sure."""
    generator = torch.Generator().manual_seed(17)
    policy, ref, other = (
        torch.log_softmax(scale * torch.randn(50, generator=generator, dtype=torch.float64), 0)
        for scale in (3.0, 3.0, 0.5)
    )
    exact = float((policy.exp() * (policy - ref)).sum())
    old = policy if sampled_by == "policy" else other
    within, errors = 0, []
    for _ in range(200):
        drawn = torch.multinomial(old.exp(), 400, replacement=True, generator=generator)
        tokens = Tokens.padded(torch.ones(40, 10))
        old_logprobs = None if sampled_by == "policy" else old[drawn]
        divergence = reported_kl(policy[drawn], ref[drawn], old_logprobs).reshape(40, 10)
        kl, error = mean_kl(divergence, tokens, range(40))
        within += abs(kl - exact) < 1.96 * error
        errors.append(kl - exact)
    assert abs(statistics.fmean(errors)) < 4 * statistics.stdev(errors) / len(errors) ** 0.5
    assert 170 <= within <= 200, "some 95 % of the intervals have the KL inside"


def test_responses_of_any_length_count_by_their_tokens_and_masked_ones_not_at_all() -> None:
    divergence = torch.tensor([[1.0, 3.0, 9.0], [5.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    kl, error = mean_kl(divergence, Tokens.padded(mask), "abc")
    assert kl == pytest.approx(3.0)
    # Sums 4 and 5 of 2 and 1 tokens: residues -2 and 2, over 3 tokens, two responses drawn.
    assert error == pytest.approx((2 * (4 + 4)) ** 0.5 / 3)


def test_responses_to_one_prompt_are_one_draw() -> None:
    """Two prompts with two responses each; the error is that of their sums."""
    divergence = torch.tensor([[1.0], [3.0], [5.0], [7.0]])
    tokens = Tokens.padded(torch.ones(4, 1))
    assert mean_kl(divergence, tokens, "aabb") == pytest.approx((4.0, 2.0))
    assert mean_kl(divergence, tokens, "aaaa") == (4.0, None)


def test_an_adaptive_coefficient_never_turns_negative() -> None:
    assert next_kl_coef(0.1, 0.0, target=6, horizon=10, num_sequences=65536) == pytest.approx(0.08)
    assert next_kl_coef(0.1, 99.0, target=6, horizon=10, num_sequences=65536) == pytest.approx(0.12)
