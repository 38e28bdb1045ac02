"""KTO: the published formula in a plain loop, its baseline, and any layout of a step."""

import math
from dataclasses import astuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stages.algorithms.loss import Counts, Loss, Per
from stages.algorithms.preference import KtoObjective, kto_baseline, kto_loss
from tests.algorithms.layouts import (
    Lengths,
    MicroBatch,
    assert_by_the_formula,
    counts_of,
    in_any_layout,
    num_tokens,
    outcome,
    random_field,
    unit_lengths,
    whole,
)

OBJECTIVE = KtoObjective(beta=0.4, desirable_weight=1.3, undesirable_weight=0.7)
BASELINE = 0.6


def shares_of(lengths: Lengths, reference: Tensor, desirable: list[bool], baseline: float):
    """A micro-batch's share of the step's loss and metrics."""
    counts = counts_of(lengths)

    def share(batch: MicroBatch, laid: Tensor) -> Loss:
        tokens = batch.tokens
        loss = kto_loss(
            tokens.by_sequence(laid),
            tokens.by_sequence(batch.lay(reference)),
            torch.tensor([desirable[unit] for unit in batch.units]),
            tokens.lengths,
            baseline,
            counts,
            OBJECTIVE,
        )
        assert {metric.per for metric in loss.metrics.values()} == {Per.SEQUENCE}
        return loss

    return share


def by_the_formula(
    policy: list[list[float]], reference: list[list[float]], desirable: list[bool]
) -> dict[str, float]:
    """The mean of lambda_y - v(x, y), response by response."""
    beta, good, bad = astuple(OBJECTIVE)
    names = ["loss", "label_accuracy", "desirable_share"]
    sums = dict.fromkeys([*names, "desirable_reward_share", "undesirable_reward_share"], 0.0)
    for logprobs, ref_logprobs, is_good in zip(policy, reference, desirable, strict=True):
        log_ratio = sum(logprobs) - sum(ref_logprobs)
        if is_good:
            sums["loss"] += good - good / (1 + math.exp(-beta * (log_ratio - BASELINE)))
            sums["label_accuracy"] += log_ratio > BASELINE
            sums["desirable_share"] += 1
            sums["desirable_reward_share"] += beta * log_ratio
        else:
            sums["loss"] += bad - bad / (1 + math.exp(-beta * (BASELINE - log_ratio)))
            sums["label_accuracy"] += log_ratio < BASELINE
            sums["undesirable_reward_share"] += beta * log_ratio
    return {name: total / len(policy) for name, total in sums.items()}


def of_one(logprob: float, desirable: bool, baseline: float = 0.0) -> tuple[float, float]:
    """The loss of one response with a reference log-prob of -5, and its slope."""
    logprobs = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    loss = kto_loss(
        logprobs,
        torch.full((1,), -5.0),
        torch.tensor([desirable]),
        torch.tensor([3]),
        baseline,
        Counts(3, 1),
        OBJECTIVE,
    )
    (slope,) = torch.autograd.grad(loss.value, logprobs)
    return loss.value.item(), slope.item()


@given(data=st.data(), lengths=unit_lengths(1), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_a_step_does_not_depend_on_its_layout(data, lengths, seed):
    logprobs, reference = (random_field(num_tokens(lengths), seed + n) for n in (0, 1))
    desirable = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    share = shares_of(lengths, reference, desirable, BASELINE)
    in_any_layout(data, lengths, logprobs, share)


@pytest.mark.parametrize("seed", range(3))
def test_loss_gradient_and_metrics_are_those_of_the_paper(seed):
    lengths: Lengths = [(2,), (1,), (4,), (3,), (2,)]
    desirable = [True, False, False, True, True]
    logprobs, reference = (random_field(num_tokens(lengths), seed + n) for n in (0, 50))

    def expected(field: Tensor) -> dict[str, float]:
        sizes = [length for (length,) in lengths]
        sides = ([part.tolist() for part in side.split(sizes)] for side in (field, reference))
        return by_the_formula(*sides, desirable)

    share = shares_of(lengths, reference, desirable, BASELINE)
    ours = outcome(whole(lengths), logprobs, counts_of(lengths), share)
    assert_by_the_formula(ours, expected, logprobs)


def test_at_the_baseline_a_response_pays_half_its_weight_and_moves_fastest():
    assert of_one(-5.0, True)[0] == pytest.approx(1.3 / 2)
    assert of_one(-5.0, False)[0] == pytest.approx(0.7 / 2)
    assert of_one(-4.2, True, baseline=0.8) == pytest.approx((1.3 / 2, -1.3 * 0.4 / 4))
    assert of_one(-4.2, False, baseline=0.8) == pytest.approx((0.7 / 2, 0.7 * 0.4 / 4))
    assert abs(of_one(-2.0, True)[1]) < abs(of_one(-5.0, True)[1])


def test_a_higher_baseline_asks_more_of_the_desirable_and_less_of_the_undesirable():
    assert of_one(-5.0, True, baseline=1.0)[0] > of_one(-5.0, True)[0]
    assert of_one(-5.0, False, baseline=1.0)[0] < of_one(-5.0, False)[0]


def test_extreme_logprobs_give_finite_losses_and_gradients():
    for logprob in (-1e4, 0.0):
        for desirable in (True, False):
            assert all(map(math.isfinite, of_one(logprob, desirable)))
    assert of_one(-1e4, True)[0] == pytest.approx(1.3)
    assert of_one(-1e4, False)[0] == pytest.approx(0.0)


def test_the_baseline_is_a_mean_of_the_whole_step_and_never_negative():
    assert kto_baseline(6.0, 4) == 1.5
    assert kto_baseline(-6.0, 4) == 0.0


def test_mean_rewards_of_each_side_follow_from_their_shares():
    lengths: Lengths = [(1,), (1,), (1,)]
    logprobs = torch.tensor([-1.0, -2.0, -6.0], dtype=torch.float64)
    share = shares_of(lengths, torch.full_like(logprobs, -3.0), [True, True, False], BASELINE)
    metrics = outcome(whole(lengths), logprobs, counts_of(lengths), share).metrics
    good = float(metrics["desirable_share"])
    assert float(metrics["desirable_reward_share"]) / good == pytest.approx(0.4 * 1.5)
    assert float(metrics["undesirable_reward_share"]) / (1 - good) == pytest.approx(0.4 * -3)


def test_a_response_without_tokens_may_hold_anything():
    logprobs = torch.tensor([-2.0, math.nan], requires_grad=True)
    loss = kto_loss(
        logprobs,
        torch.tensor([-3.0, -math.inf]),
        torch.tensor([True, False]),
        torch.tensor([2, 0]),
        0.0,
        Counts(2, 1),
        OBJECTIVE,
    )
    loss.value.backward()
    assert loss.value.item() == pytest.approx(1.3 / (1 + math.exp(0.4)))
    assert logprobs.grad[1] == 0
    assert all(metric.value.isfinite() for metric in loss.metrics.values())
