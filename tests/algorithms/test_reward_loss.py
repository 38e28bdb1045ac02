"""Reward-model losses: numbers by hand and in plain loops, and any layout of a step."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stages.algorithms.loss import Counts, Loss, Per, Tokens
from stages.algorithms.reward_loss import (
    bradley_terry_loss,
    last_token_only,
    process_loss,
    regression_loss,
    step_reward,
    tokens_that_differ,
)
from stages.contracts.objectives import StepReward
from stages.data.batching import collate
from stages.rewards.model import RewardRule
from tests.algorithms.layouts import (
    LAYOUTS,
    Layout,
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

ONE_ROW_A_PAIR = LAYOUTS.filter(lambda layout: layout.style != "packed")
"""The two responses of a pair are compared column by column."""


def pair_shares(lengths: Lengths, margins: Tensor, last_only: bool):
    """A micro-batch's share; the field holds the chosen and rejected score at each token."""
    counts = counts_of(lengths)

    def share(batch: MicroBatch, laid: Tensor) -> Loss:
        mask = batch.tokens.mask.double()
        loss = bradley_terry_loss(
            laid[..., 0],
            laid[..., 1],
            last_token_only(mask) if last_only else mask,
            counts,
            centre=0.07,
            margins=margins[batch.units],
        )
        assert {metric.per for metric in loss.metrics.values()} == {Per.SEQUENCE}
        return loss

    return share


def bradley_terry_by_the_formula(
    scores: Tensor, lengths: Lengths, margins: Tensor, last_only: bool
) -> dict[str, float]:
    """The step's loss and metrics, token by token."""
    loss, num_right, total_margin = 0.0, 0, 0.0
    parts = scores.split([length for (length,) in lengths])
    for part, margin in zip(parts, margins.tolist(), strict=True):
        pairs = part.tolist()[-1:] if last_only else part.tolist()
        of_pair = 0.0
        for chosen, rejected in pairs:
            of_pair -= math.log(1 / (1 + math.exp(-(chosen - rejected - margin))))
            of_pair += 0.07 * (chosen + rejected) ** 2
        loss += of_pair / len(pairs)
        at_end = pairs[-1][0] - pairs[-1][1]
        num_right += at_end > 0
        total_margin += at_end
    num = len(lengths)
    return {
        "loss": loss / num,
        "preference_accuracy": num_right / num,
        "reward_margin": total_margin / num,
    }


@pytest.mark.parametrize("last_only", [False, True])
@given(data=st.data(), lengths=unit_lengths(1), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_a_step_of_pairs_does_not_depend_on_its_layout(last_only, data, lengths, seed):
    scores = random_field(num_tokens(lengths), seed, 2)
    margins = random_field(len(lengths), seed + 1)
    margins[[unit for unit, (length,) in enumerate(lengths) if not length]] = math.nan
    share = pair_shares(lengths, margins, last_only)
    in_any_layout(data, lengths, scores, share, layouts=ONE_ROW_A_PAIR)


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_bradley_terry_is_that_of_a_plain_loop(last_only, seed):
    lengths: Lengths = [(2,), (1,), (4,)]
    scores, margins = random_field(num_tokens(lengths), seed, 2), random_field(3, seed + 9)

    def expected(field: Tensor) -> dict[str, float]:
        return bradley_terry_by_the_formula(field, lengths, margins, last_only)

    share = pair_shares(lengths, margins, last_only)
    ours = outcome(whole(lengths), scores, counts_of(lengths), share)
    assert_by_the_formula(ours, expected, scores)


def test_bradley_terry_is_the_log_likelihood_of_the_preference():
    chosen, rejected, mask = torch.tensor([[2.0]]), torch.tensor([[0.5]]), torch.ones(1, 1)
    counts = Counts(1, 1)
    loss = bradley_terry_loss(chosen, rejected, mask, counts, centre=0.0).value
    assert float(loss) == pytest.approx(-math.log(1 / (1 + math.exp(-1.5))))
    centred = bradley_terry_loss(chosen, rejected, mask, counts, centre=0.1).value
    assert float(centred - loss) == pytest.approx(0.1 * 2.5**2)
    asked = torch.tensor([1.5])
    wider = bradley_terry_loss(chosen, rejected, mask, counts, centre=0.0, margins=asked).value
    assert float(wider) == pytest.approx(math.log(2))


def test_a_long_pair_counts_as_much_as_a_short_one():
    chosen = torch.tensor([[1.0, 9.0, 9.0], [3.0, 3.0, 3.0]])
    mask = torch.tensor([[1.0, 0, 0], [1, 1, 1]])
    loss = bradley_terry_loss(chosen, torch.zeros(2, 3), mask, Counts(4, 2), centre=0.0)
    expected = (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(-3))) / 2
    assert float(loss.value) == pytest.approx(expected)
    assert float(loss.metrics["reward_margin"].value) == 4
    assert float(loss.metrics["preference_accuracy"].value) == 2


def test_preferences_are_compared_from_the_first_difference_to_the_longer_end():
    chosen = torch.tensor([[5, 6, 7, 0], [5, 6, 0, 0], [5, 6, 0, 0], [5, 6, 7, 8]])
    rejected = torch.tensor([[5, 8, 0, 0], [5, 6, 9, 0], [5, 6, 0, 0], [5, 9, 7, 8]])
    mask = tokens_that_differ(
        chosen,
        rejected,
        torch.tensor([[1.0, 1, 1, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]),
        torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]),
    )
    assert mask.tolist() == [[0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 1]]


def test_the_last_token_is_the_last_that_is_compared():
    mask = torch.tensor([[0.0, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]])
    expected = [[0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]]
    assert last_token_only(mask).tolist() == expected


@given(data=st.data(), num=st.integers(1, 7), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_a_step_of_ratings_does_not_depend_on_its_layout(data, num, seed):
    lengths: Lengths = [(1,)] * num
    scores, ratings = random_field(num, seed), random_field(num, seed + 1)
    counts = Counts(num, num)

    def share(batch: MicroBatch, laid: Tensor) -> Loss:
        loss = regression_loss(laid[:, 0], ratings[batch.units], counts)
        return loss

    plain = in_any_layout(data, lengths, scores, share, layouts=st.just(Layout()))
    errors = [a - b for a, b in zip(scores.tolist(), ratings.tolist(), strict=True)]
    assert float(plain.value) == pytest.approx(sum(e * e for e in errors) / num)
    assert plain.gradient.tolist() == pytest.approx([2 * error / num for error in errors])
    mean_error = float(plain.metrics["mean_absolute_error"])
    assert mean_error == pytest.approx(sum(map(abs, errors)) / num)


def step_shares(lengths: Lengths, labels: Tensor):
    counts = counts_of(lengths)

    def share(batch: MicroBatch, laid: Tensor) -> Loss:
        loss = process_loss(laid, batch.lay(labels), batch.tokens, counts)
        assert loss.metrics["step_accuracy"].per is Per.TOKEN
        return loss

    return share


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool])
@given(data=st.data(), lengths=unit_lengths(1), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_a_step_of_labelled_steps_does_not_depend_on_its_layout(dtype, data, lengths, seed):
    scores = random_field(num_tokens(lengths), seed) + 1.5
    labels = (random_field(num_tokens(lengths), seed + 1) > -1.5).to(dtype)
    share = step_shares(lengths, labels)
    plain = in_any_layout(data, lengths, scores, share)
    loss, num_right, gradient = 0.0, 0, []
    for score, label in zip(scores.tolist(), labels.tolist(), strict=True):
        right = 1 / (1 + math.exp(-score))
        loss -= math.log(right if label else 1 - right)
        num_right += (score > 0) == bool(label)
        gradient.append((right - label) / len(scores))
    assert float(plain.value) == pytest.approx(loss / len(scores))
    assert plain.gradient.tolist() == pytest.approx(gradient)
    assert float(plain.metrics["step_accuracy"]) == pytest.approx(num_right / len(scores))


def test_a_label_may_be_a_probability():
    tokens = Tokens.padded(torch.ones(1, 1))
    score = torch.tensor([[math.log(3)]])
    loss = process_loss(score, torch.tensor([[0.75]]), tokens, tokens.counts())
    # The score says 0.75 too: what is left is the entropy of that.
    assert float(loss.value) == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert float(loss.metrics["step_accuracy"].value) == 1


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (StepReward.MIN, [0.25, 0.5, 0.0]),
        (StepReward.PRODUCT, [0.75 * 0.25 * 0.5, 0.5, 0.0]),
        (StepReward.LAST, [0.5, 0.5, 0.0]),
    ],
)
def test_a_response_is_rewarded_for_its_steps(how, expected):
    log3, nan = math.log(3), math.nan
    scores = torch.tensor([[log3, nan, -log3, 0.0], [nan, 0.0, math.inf, nan], [nan] * 4])
    mask = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]])
    assert step_reward(scores, Tokens.padded(mask), how).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("how", list(StepReward))
@given(
    lengths=st.lists(st.tuples(st.integers(0, 4)), min_size=1, max_size=5),
    layout=LAYOUTS,
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None)
def test_the_reward_of_steps_does_not_depend_on_their_layout(how, lengths, layout, seed):
    scores = random_field(num_tokens(lengths), seed)
    batch = MicroBatch(list(range(len(lengths))), layout, lengths)
    rewards = step_reward(batch.lay(scores), batch.tokens, how)
    for reward, part in zip(
        rewards.tolist(), scores.split([length for (length,) in lengths]), strict=True
    ):
        steps = [1 / (1 + math.exp(-score)) for score in part.tolist()]
        expected = {
            StepReward.MIN: min(steps, default=0.0),
            StepReward.PRODUCT: math.prod(steps) if steps else 0.0,
            StepReward.LAST: steps[-1] if steps else 0.0,
        }[how]
        assert reward == pytest.approx(expected)


def test_the_end_of_a_response_ends_its_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token 9 ends a step; the first response ends without one, the second has none at all."""
    batch = collate([[1], [1, 2]], [[9, 5], [5, 6, 7]], pad_id=0)
    scores = torch.tensor([[0.0, 2.0, -1.0, 0.0, 0.0], [0.0, 0.0, 3.0, 3.0, -2.0]])
    monkeypatch.setattr("stages.rewards.model.token_scores", lambda *_: scores)
    found = RewardRule(step_token=9, step_reward=StepReward.MIN).rewards(None, batch)
    torch.testing.assert_close(found, torch.sigmoid(torch.tensor([-1.0, -2.0])))
