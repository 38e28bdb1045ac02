"""Preference losses: published formulas in plain loops, known optima, and any layout of a step."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stages.algorithms.loss import Counts, Loss, Per, Tokens
from stages.algorithms.preference import PairLogprobs, PreferenceObjective, preference_loss
from stages.contracts.objectives import REFERENCE_FREE, PreferenceLoss
from tests.algorithms.layouts import (
    Lengths,
    MicroBatch,
    assert_by_the_formula,
    in_any_layout,
    num_tokens,
    outcome,
    random_field,
    unit_lengths,
    valid_units,
    whole,
)

PAIRED = [kind for kind in PreferenceLoss if kind is not PreferenceLoss.KTO]
METRICS = {
    "preference_accuracy": Per.SEQUENCE,
    "reward_margin": Per.SEQUENCE,
    "chosen_reward": Per.SEQUENCE,
    "rejected_reward": Per.SEQUENCE,
    "chosen_logprob": Per.SEQUENCE,
    "rejected_logprob": Per.SEQUENCE,
    "chosen_nll": Per.TOKEN,
}
DPO = PreferenceObjective(PreferenceLoss.SIGMOID, 0.1)
SETTINGS = {"beta": 0.3, "label_smoothing": 0.15, "margin": 0.4, "nll_coef": 0.25}


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def by_the_formula(
    kind: PreferenceLoss,
    policy: list[tuple[list[float], list[float]]],
    reference: list[tuple[list[float], list[float]]],
    beta: float,
    label_smoothing: float,
    margin: float,
    nll_coef: float,
) -> dict[str, float]:
    """The step's loss and metrics, pair by pair, with the formulas as the papers print them."""
    losses, nll, num_chosen = 0.0, 0.0, 0
    sums = dict.fromkeys(METRICS, 0.0)
    for (chosen, rejected), (ref_chosen, ref_rejected) in zip(policy, reference, strict=True):
        log_w, log_l = sum(chosen), sum(rejected)
        h_w, h_l = log_w - sum(ref_chosen), log_l - sum(ref_rejected)
        mean_w, mean_l = log_w / len(chosen), log_l / len(rejected)
        r_w, r_l = beta * h_w, beta * h_l
        right, wrong = -math.log(sigma(r_w - r_l)), -math.log(sigma(r_l - r_w))
        e = label_smoothing
        if kind == "sigmoid":
            loss = (1 - e) * right + e * wrong
        elif kind == "hinge":
            loss = max(0.0, 1 - (r_w - r_l))
        elif kind == "ipo":
            loss = (h_w / len(chosen) - h_l / len(rejected) - 1 / (2 * beta)) ** 2
        elif kind == "robust":
            loss = ((1 - e) * right - e * wrong) / (1 - 2 * e)
        elif kind == "apo_zero":
            loss = 2 - sigma(r_w) + sigma(r_l) - 1
        elif kind == "apo_down":
            loss = sigma(r_w) - sigma(r_w - r_l) + 1
        elif kind == "simpo":
            r_w, r_l = beta * mean_w, beta * mean_l
            loss = -math.log(sigma(r_w - r_l - margin))
        else:
            r_w, r_l = beta * mean_w, beta * mean_l
            p_w, p_l = math.exp(mean_w), math.exp(mean_l)
            odds_ratio = (p_w / (1 - p_w)) / (p_l / (1 - p_l))
            loss = -beta * math.log(sigma(math.log(odds_ratio)))
        losses += loss
        nll -= log_w
        num_chosen += len(chosen)
        sums["preference_accuracy"] += r_w > r_l
        sums["reward_margin"] += r_w - r_l
        sums["chosen_reward"] += r_w
        sums["rejected_reward"] += r_l
        sums["chosen_logprob"] += log_w
        sums["rejected_logprob"] += log_l
    means = {name: total / len(policy) for name, total in sums.items()}
    means["chosen_nll"] = nll / num_chosen
    weight = 1.0 if kind == "orpo" else nll_coef
    return {"loss": losses / len(policy) + weight * means["chosen_nll"], **means}


def pair_counts(lengths: Lengths) -> Counts:
    """The valid pairs of the step and the tokens of their chosen responses."""
    valid = valid_units(lengths)
    return Counts(sum(lengths[unit][0] for unit in valid), len(valid))


def shares_of(kind: PreferenceLoss, lengths: Lengths, reference: Tensor):
    """A micro-batch's share of the step's loss and metrics."""
    counts = pair_counts(lengths)

    def share(batch: MicroBatch, laid: Tensor) -> Loss:
        loss = preference_loss(
            PairLogprobs.from_tokens(laid, batch.tokens),
            PairLogprobs.from_tokens(batch.lay(reference), batch.tokens),
            counts,
            PreferenceObjective(kind, **SETTINGS),
        )
        assert {name: metric.per for name, metric in loss.metrics.items()} == METRICS
        return loss

    return share


def as_lists(field: Tensor, lengths: Lengths) -> list[tuple[list[float], list[float]]]:
    parts = iter(field.split([length for unit in lengths for length in unit]))
    return [(next(parts).tolist(), next(parts).tolist()) for _ in lengths]


def a_pair(
    chosen: float, rejected: float, chosen_tokens: int = 1, rejected_tokens: int = 1
) -> PairLogprobs:
    return PairLogprobs(
        torch.tensor([chosen], dtype=torch.float64, requires_grad=True),
        torch.tensor([rejected], dtype=torch.float64, requires_grad=True),
        torch.tensor([chosen_tokens]),
        torch.tensor([rejected_tokens]),
    )


def value_and_slopes(
    policy: PairLogprobs, reference: PairLogprobs | None, kind: str, beta: float, **more: float
) -> tuple[float, float, float]:
    """The loss of a pair, and its gradient by the chosen and by the rejected log-prob."""
    loss = preference_loss(
        policy, reference, policy.counts(), PreferenceObjective(PreferenceLoss(kind), beta, **more)
    )
    chosen, rejected = torch.autograd.grad(loss.value, [policy.chosen, policy.rejected])
    return loss.value.item(), chosen.item(), rejected.item()


@pytest.mark.parametrize("kind", PAIRED)
@given(data=st.data(), lengths=unit_lengths(2), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_a_step_does_not_depend_on_its_layout(kind, data, lengths, seed):
    logprobs = random_field(num_tokens(lengths), seed)
    share = shares_of(kind, lengths, random_field(num_tokens(lengths), seed + 1))
    in_any_layout(data, lengths, logprobs, share, counts=pair_counts(lengths))


@pytest.mark.parametrize("kind", PAIRED)
@pytest.mark.parametrize("seed", range(3))
def test_losses_gradients_and_metrics_are_those_of_the_papers(kind, seed):
    lengths: Lengths = [(2, 3), (1, 1), (4, 2)]
    logprobs, reference = (random_field(num_tokens(lengths), seed + n) for n in (0, 50))

    def expected(field: Tensor) -> dict[str, float]:
        pairs = as_lists(field, lengths), as_lists(reference, lengths)
        return by_the_formula(kind, *pairs, **SETTINGS)

    share = shares_of(kind, lengths, reference)
    ours = outcome(whole(lengths), logprobs, pair_counts(lengths), share)
    assert_by_the_formula(ours, expected, logprobs)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # Log-ratios 2 and -1, of 4 and 2 tokens; beta 0.5, so rewards 1 and -0.5.
        ("sigmoid", math.log(1 + math.exp(-1.5))),
        ("hinge", 0.0),
        ("ipo", (0.5 + 0.5 - 1.0) ** 2),
        ("robust", math.log(1 + math.exp(-1.5))),
        ("apo_zero", 1 / (1 + math.e) + 1 / (1 + math.exp(0.5))),
        ("apo_down", 1 / (1 + math.exp(-1)) + 1 / (1 + math.exp(1.5))),
        # Average log-probs -1 and -2.
        ("simpo", math.log(1 + math.exp(-0.5))),
        # Odds 1/(e - 1) and 1/(e^2 - 1): their ratio is e + 1. The chosen nll is 1 a token.
        ("orpo", 1 + 0.5 * math.log((math.e + 2) / (math.e + 1))),
    ],
)
def test_each_loss_of_a_pair_by_hand(kind, expected):
    policy, reference = a_pair(-4.0, -4.0, 4, 2), a_pair(-6.0, -3.0, 4, 2)
    assert value_and_slopes(policy, reference, kind, 0.5)[0] == pytest.approx(expected, abs=1e-12)


def test_the_likelihood_of_chosen_responses_is_a_mean_over_the_tokens_of_the_step():
    policy = PairLogprobs(
        torch.tensor([-2.0, -12.0]), torch.zeros(2), torch.tensor([1, 3]), torch.ones(2)
    )
    without, with_nll = (
        preference_loss(policy, policy, policy.counts(), replace(DPO, nll_coef=coef)).value
        for coef in (0.0, 2.0)
    )
    assert float(without) == pytest.approx(math.log(2))
    assert float(with_nll - without) == pytest.approx(2 * (2 + 12) / 4)


def test_the_rows_of_a_batch_are_the_chosen_responses_and_then_the_rejected_ones():
    logprobs = torch.tensor([[-1.0, -2.0], [-4.0, math.nan], [-8.0, math.inf], [-16.0, -32.0]])
    pairs = PairLogprobs.from_tokens(
        logprobs, Tokens.padded(torch.tensor([[1, 1], [1, 0], [1, 0], [0, 0]]))
    )
    assert pairs.chosen.tolist() == [-3, -4]
    assert pairs.rejected.tolist() == [-8, 0]
    assert (pairs.chosen_tokens.tolist(), pairs.rejected_tokens.tolist()) == ([2, 1], [1, 0])
    assert pairs.valid.tolist() == [True, False]
    assert pairs.counts() == Counts(tokens=2, sequences=1)


def test_a_reference_that_says_anything_of_a_pair_that_does_not_count_changes_nothing():
    policy = PairLogprobs(
        torch.tensor([-2.0, math.nan], requires_grad=True),
        torch.tensor([-3.0, -math.inf], requires_grad=True),
        torch.tensor([2, 3]),
        torch.tensor([1, 0]),
    )
    reference = PairLogprobs(
        torch.tensor([-2.5, math.inf]), torch.tensor([-3.0, math.nan]), *[torch.ones(2)] * 2
    )
    for kind in PAIRED:
        loss = preference_loss(
            policy, reference, policy.counts(), PreferenceObjective(kind, **SETTINGS)
        )
        gradients = torch.autograd.grad(loss.value, [policy.chosen, policy.rejected])
        assert loss.value.isfinite()
        for gradient in gradients:
            assert gradient.isfinite().all()
            assert gradient[1] == 0


@pytest.mark.parametrize("kind", sorted(set(PAIRED) - REFERENCE_FREE))
def test_a_loss_that_needs_a_reference_says_so(kind):
    policy = a_pair(-1.0, -2.0)
    with pytest.raises(ValueError, match=f"{kind} loss needs the log-probs of a reference"):
        preference_loss(policy, None, policy.counts(), PreferenceObjective(kind, 0.1))


@pytest.mark.parametrize("kind", sorted(REFERENCE_FREE))
def test_a_reference_free_loss_does_not_look_at_a_reference(kind):
    policy = a_pair(-1.0, -2.0, 2, 3)
    losses = [
        preference_loss(
            policy, reference, policy.counts(), PreferenceObjective(kind, 0.7, margin=0.2)
        )
        for reference in (None, a_pair(math.nan, -5.0))
    ]
    assert losses[0].value == losses[1].value
    for name, metric in losses[0].metrics.items():
        assert metric.value == losses[1].metrics[name].value


def test_kto_is_no_loss_of_pairs():
    policy = a_pair(-1.0, -2.0)
    with pytest.raises(ValueError, match="kto_loss"):
        preference_loss(
            policy, policy, policy.counts(), PreferenceObjective(PreferenceLoss.KTO, 0.1)
        )


@pytest.mark.parametrize("kind", PAIRED)
def test_extreme_logprobs_give_finite_losses_and_gradients(kind):
    for chosen, rejected in [(-1e4, -1e-9), (-1e-9, -1e4), (-1e4, -1e4), (0.0, 0.0), (0.0, -1e4)]:
        for dtype in (torch.float32, torch.float64):
            policy = PairLogprobs(
                torch.tensor([chosen], dtype=dtype, requires_grad=True),
                torch.tensor([rejected], dtype=dtype, requires_grad=True),
                torch.tensor([1]),
                torch.tensor([2]),
            )
            reference = a_pair(-3.0, -3.0)
            loss = preference_loss(
                policy, reference, policy.counts(), PreferenceObjective(kind, **SETTINGS)
            )
            assert loss.value.isfinite()
            for gradient in torch.autograd.grad(loss.value, [policy.chosen, policy.rejected]):
                assert gradient.isfinite().all()


@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "robust", "apo_zero", "simpo", "orpo"])
def test_the_chosen_response_is_pushed_up_and_the_rejected_one_down(kind):
    _, chosen, rejected = value_and_slopes(a_pair(-3.0, -2.5), a_pair(-2.8, -2.9), kind, 0.2)
    assert chosen < 0 < rejected


def test_apo_down_pushes_both_down_and_the_rejected_one_further():
    # Rewards 0.5 and -1.0: the chosen response has risen above the reference.
    _, chosen, rejected = value_and_slopes(a_pair(-2.0, -4.0), a_pair(-2.5, -3.0), "apo_down", 1.0)
    assert chosen > 0
    assert rejected > 0
    # Where both policies agree, only the rejected response is pushed.
    _, chosen, rejected = value_and_slopes(a_pair(-2.0, -4.0), a_pair(-2.0, -4.0), "apo_down", 1.0)
    assert chosen == pytest.approx(0, abs=1e-12)
    assert rejected == pytest.approx(0.25)


def test_a_policy_that_is_its_reference_pays_log_two_and_a_larger_beta_moves_it_harder():
    same = a_pair(-2.0, -3.0)
    results = [value_and_slopes(same, a_pair(-2.0, -3.0), "sigmoid", beta) for beta in (0.1, 0.5)]
    assert [value for value, *_ in results] == pytest.approx([math.log(2)] * 2)
    assert [chosen for _, chosen, _ in results] == pytest.approx([-0.05, -0.25])
    # A pair that is ranked right pays less with a larger beta, one that is ranked wrong more.
    right, wrong = a_pair(-1.0, -4.0), a_pair(-4.0, -1.0)
    for pair, order in ((right, 1), (wrong, -1)):
        small, large = (value_and_slopes(pair, same, "sigmoid", beta)[0] for beta in (0.1, 0.5))
        assert (small - large) * order > 0


def test_ipo_rests_where_the_average_log_ratios_differ_by_half_the_inverse_of_beta():
    # Averages -0.5 and -3, 2.5 apart, which is 1 / (2 * 0.2).
    reference = a_pair(0.0, 0.0, 2, 3)
    value, *gradient = value_and_slopes(a_pair(-1.0, -9.0, 2, 3), reference, "ipo", 0.2)
    assert [value, *gradient] == pytest.approx([0, 0, 0], abs=1e-12)
    short, past = (
        value_and_slopes(a_pair(-1.0, rejected, 2, 3), reference, "ipo", 0.2)[2]
        for rejected in (-8.0, -10.0)
    )
    assert past < 0 < short


def test_robust_with_no_wrong_labels_is_dpo_and_is_unbiased_with_them():
    pair, flipped = (a_pair(-2.0, -3.0), a_pair(-3.0, -2.0))
    reference, flipped_reference = a_pair(-2.5, -2.6), a_pair(-2.6, -2.5)
    dpo = value_and_slopes(pair, reference, "sigmoid", 0.4)
    assert value_and_slopes(pair, reference, "robust", 0.4) == pytest.approx(dpo)
    smoothed = {"label_smoothing": 0.2}
    seen = value_and_slopes(pair, reference, "robust", 0.4, **smoothed)[0]
    seen_flipped = value_and_slopes(flipped, flipped_reference, "robust", 0.4, **smoothed)[0]
    assert 0.8 * seen + 0.2 * seen_flipped == pytest.approx(dpo[0])


def test_robust_refuses_labels_that_are_wrong_as_often_as_right():
    pair = a_pair(-2.0, -3.0)
    with pytest.raises(ValueError, match=r"label_smoothing must be in \[0, 0\.5\)"):
        value_and_slopes(pair, pair, "robust", 0.4, label_smoothing=0.5)


def test_cdpo_rests_at_the_margin_that_its_label_noise_implies():
    # sigmoid(margin) = 1 - label_smoothing: no margin at 0.5, log 4 at 0.2.
    reference = a_pair(-2.0, -3.0)
    for smoothing, margin in ((0.5, 0.0), (0.2, math.log(4))):
        pair = a_pair(-2.0 + margin, -3.0)
        _, *gradient = value_and_slopes(pair, reference, "sigmoid", 1.0, label_smoothing=smoothing)
        assert gradient == pytest.approx([0, 0], abs=1e-12)
        _, *gradient = value_and_slopes(pair, reference, "sigmoid", 1.0)
        assert gradient[0] < 0


def test_the_hinge_is_flat_past_a_reward_margin_of_one():
    reference = a_pair(-5.0, -5.0)
    value, *gradient = value_and_slopes(a_pair(-5.0, -7.1), reference, "hinge", 0.5)
    assert (value, *gradient) == (0, 0, 0)
    value, *gradient = value_and_slopes(a_pair(-5.0, -6.9), reference, "hinge", 0.5)
    assert (value, *gradient) == pytest.approx((0.05, -0.5, 0.5))


def test_simpos_margin_is_a_difference_of_rewards():
    # beta * (-1 - -2) = 2, and with a margin of 2 there is nothing left: log 2.
    pair = a_pair(-3.0, -2.0, 3, 1)
    assert value_and_slopes(pair, None, "simpo", 2.0, margin=2.0)[0] == pytest.approx(math.log(2))
    longer = a_pair(-6.0, -4.0, 6, 2)
    assert value_and_slopes(longer, None, "simpo", 2.0)[0] == pytest.approx(
        value_and_slopes(pair, None, "simpo", 2.0)[0]
    )


def test_a_pair_that_is_not_told_apart_is_not_ranked_right():
    pair = a_pair(-2.0, -3.0)
    loss = preference_loss(pair, pair, pair.counts(), DPO)
    assert loss.metrics["preference_accuracy"].value == 0


def test_metrics_bear_no_gradient():
    pair = a_pair(-2.0, -3.0)
    loss = preference_loss(pair, pair, pair.counts(), DPO)
    assert not any(m.share(pair.counts()).requires_grad for m in loss.metrics.values())


def test_a_difference_within_rounding_is_a_tie() -> None:
    """As where the policy is the reference, computed in another batch."""
    tokens = torch.tensor([20.0, 20.0])
    chosen, rejected = torch.full((2,), -40.0).double(), torch.full((2,), -60.0).double()
    reference = PairLogprobs(chosen, rejected, tokens, tokens)
    policy = PairLogprobs(chosen + torch.tensor([2e-6, 2e-3]), rejected, tokens, tokens)
    said = preference_loss(policy, reference, Counts(40, 2), DPO)
    assert said.metrics["preference_accuracy"].value.item() == 1
