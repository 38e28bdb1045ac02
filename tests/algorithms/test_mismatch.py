"""Importance weights between trainer and sampler, from ratios chosen by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.algorithms.mismatch import Mismatched, mismatch_weights
from stages.contracts.objectives import Mismatch

RATIOS = torch.tensor([[0.25, 1.0, 4.0], [0.5, 1.5, math.nan]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, True, False]])


def correct(how: Mismatch, ratios=RATIOS, mask=MASK, cap=2.0, floor=0.5) -> Mismatched:
    sampler = torch.full_like(ratios, -3.0)
    return mismatch_weights(
        sampler + ratios.log(), sampler, mask, correction=how, cap=cap, floor=floor
    )


def assert_weights(result: Mismatched, expected: list[list[float]]) -> None:
    torch.testing.assert_close(result.weights, torch.tensor(expected, dtype=torch.float64))


def test_uncorrected_tokens_weigh_one_and_the_gap_is_still_measured():
    result = correct(Mismatch.NONE)
    assert result.weights.tolist() == [[1, 1, 1], [1, 1, 1]]
    gaps = [math.log(4), 0, math.log(4), math.log(2), math.log(1.5)]
    assert result.gap_mean == pytest.approx(sum(gaps) / 5)
    assert result.gap_max == pytest.approx(math.log(4))
    # Sum 7.25, squares 1/16 + 1 + 16 + 1/4 + 9/4 = 19.5625
    assert result.effective_sample_size == pytest.approx(7.25**2 / (5 * 19.5625))
    assert (result.masked_share, result.truncated_share) == (0, 0)


def test_token_weights_are_cut_to_the_cap_and_have_no_floor():
    result = correct(Mismatch.TOKEN_TRUNCATE)
    assert_weights(result, [[0.25, 1, 2], [0.5, 1.5, 1]])
    assert (result.masked_share, result.truncated_share) == (0, pytest.approx(1 / 5))
    assert result.effective_sample_size == pytest.approx(7.25**2 / (5 * 19.5625))


def test_tokens_outside_the_bounds_are_dropped():
    result = correct(Mismatch.TOKEN_MASK, floor=0.4)
    assert_weights(result, [[0, 1, 0], [0.5, 1.5, 1]])
    assert (result.masked_share, result.truncated_share) == (pytest.approx(2 / 5), 0)


def test_a_weight_on_the_bound_is_kept():
    ratios = torch.ones(1, 2, dtype=torch.float64)
    result = correct(Mismatch.TOKEN_MASK, ratios, torch.ones(1, 2), cap=1.0, floor=1.0)
    assert result.weights.tolist() == [[1, 1]]
    assert result.masked_share == 0


def test_sequence_weights_are_products_over_the_response():
    result = correct(Mismatch.SEQUENCE_TRUNCATE, cap=0.8)
    # 0.25 * 1 * 4 = 1 and 0.5 * 1.5 = 0.75
    assert_weights(result, [[0.8, 0.8, 0.8], [0.75, 0.75, 1]])
    assert (result.masked_share, result.truncated_share) == (0, pytest.approx(3 / 5))
    assert result.effective_sample_size == pytest.approx(1.75**2 / (2 * 1.5625))


@pytest.mark.parametrize(
    ("cap", "floor", "expected", "share"),
    [
        (0.8, 0.5, [[0, 0, 0], [0.75, 0.75, 1]], 3 / 5),
        (2.0, 0.8, [[1, 1, 1], [0, 0, 1]], 2 / 5),
        (2.0, 0.5, [[1, 1, 1], [0.75, 0.75, 1]], 0),
    ],
)
def test_responses_outside_the_bounds_are_dropped_whole(cap, floor, expected, share):
    result = correct(Mismatch.SEQUENCE_MASK, cap=cap, floor=floor)
    assert_weights(result, expected)
    assert result.masked_share == pytest.approx(share)


@pytest.mark.parametrize("how", Mismatch)
def test_huge_gaps_overflow_nothing(how):
    trainer = torch.tensor([[-1e4, 0.0, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
    sampler = torch.tensor([[0.0, 0.0, 0.0], [-1e4, -1e4, -1e4]])
    result = mismatch_weights(
        trainer, sampler, torch.ones(2, 3), correction=how, cap=math.inf, floor=0.0
    )
    assert result.weights.isfinite().all()
    assert not result.weights.requires_grad
    assert 0 < result.effective_sample_size <= 1
    assert result.gap_max == 1e4


def test_a_nan_is_not_hidden():
    result = correct(Mismatch.TOKEN_MASK, mask=torch.ones(2, 3))
    assert result.weights.isnan().tolist() == [[False] * 3, [False, False, True]]
    assert math.isnan(result.gap_mean)
    assert math.isnan(result.gap_max)


@pytest.mark.parametrize("how", Mismatch)
def test_without_tokens_nothing_is_wrong(how):
    for shape in ((2, 3), (0, 0)):
        result = correct(how, torch.full(shape, math.nan), torch.zeros(shape))
        assert result.weights.tolist() == torch.ones(shape).tolist()
        assert (result.gap_mean, result.gap_max, result.effective_sample_size) == (0, 0, 1)
        assert (result.masked_share, result.truncated_share) == (0, 0)


@pytest.mark.parametrize("how", Mismatch)
@given(seed=st.integers(0, 2**32), garbage=st.sampled_from([math.nan, math.inf, 0.0, 1e9]))
@settings(max_examples=25, deadline=None)
def test_padding_row_order_and_masked_rows_change_nothing(how, seed, garbage):
    rng = torch.Generator().manual_seed(seed)
    trainer, sampler = torch.randn(2, 5, 6, generator=rng, dtype=torch.float64)
    mask = torch.rand(5, 6, generator=rng) < 0.6
    mask[0, 0] = True
    order = torch.randperm(5, generator=rng)
    bounds = {"correction": how, "cap": 1.8, "floor": 0.6}
    plain = mismatch_weights(trainer, sampler, mask, **bounds)

    def moved(tensor, filler):
        return torch.nn.functional.pad(tensor[order], (3, 1, 0, 1), value=filler)

    moved_mask = moved(mask, False)
    elsewhere = mismatch_weights(
        *(moved(tensor.where(mask, garbage), garbage) for tensor in (trainer, sampler)),
        moved_mask,
        **bounds,
    )
    torch.testing.assert_close(elsewhere.weights[moved_mask], plain.weights[order][mask[order]])
    for name in (
        "gap_mean",
        "gap_max",
        "effective_sample_size",
        "masked_share",
        "truncated_share",
    ):
        assert getattr(elsewhere, name) == pytest.approx(getattr(plain, name), rel=1e-10)
