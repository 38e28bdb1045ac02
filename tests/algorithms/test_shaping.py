"""Rewards of whole responses: sums, bounds and penalties."""

import pytest
import torch

from stages.algorithms.shaping import (
    clip_rewards,
    combine,
    missing_eos,
    overlong_penalty,
    whiten_rewards,
)


def test_sources_are_summed_by_weight():
    by_source = {"style": torch.tensor([1.0, 2.0]), "maths": torch.tensor([0.0, 1.0])}
    assert combine(by_source, {"maths": 2.0, "style": -0.5}).tolist() == [-0.5, 1.0]


@pytest.mark.parametrize("weights", [{"maths": 1.0}, {"maths": 1.0, "style": 1.0, "x": 1.0}, {}])
def test_a_source_without_a_weight_or_a_weight_without_a_source_is_refused(weights):
    by_source = {"style": torch.zeros(1), "maths": torch.zeros(1)}
    with pytest.raises(ValueError, match="give each source one weight"):
        combine(by_source, weights)


def test_rewards_are_held_within_the_limit():
    assert clip_rewards(torch.tensor([-7.0, 0.5, 7.0]), 5.0).tolist() == [-5.0, 0.5, 5.0]


def test_whitened_rewards_have_mean_zero_and_deviation_one():
    white = whiten_rewards(torch.tensor([1.0, 3.0, 3.0, 5.0]))
    # Mean 3, variance 2
    assert white.tolist() == pytest.approx([-(2**0.5), 0, 0, 2**0.5])
    assert whiten_rewards(torch.full((3,), 0.1)).tolist() == [0, 0, 0]


def test_overlong_responses_are_punished_softly():
    lengths = torch.tensor([0, 60, 61, 70, 80, 100, 130])
    penalties = overlong_penalty(lengths, max_length=100, buffer=40, penalty=2.0)
    # Each token past 60 costs 2 / 40, up to 2 at 100
    assert penalties.tolist() == pytest.approx([0, 0, -0.05, -0.5, -1.0, -2.0, -2.0])


def test_without_a_buffer_nothing_is_punished():
    penalties = overlong_penalty(torch.tensor([99, 100]), max_length=100, buffer=0, penalty=1.0)
    assert penalties.tolist() == [0, 0]


def test_a_response_that_did_not_end_is_punished():
    assert missing_eos(torch.tensor([True, False]), 1.5).tolist() == [0.0, -1.5]


def test_greedy_rewards_are_whitened_by_the_sampled_ones() -> None:
    rewards = torch.tensor([1.0, 3.0, 5.0], dtype=torch.float64)
    sampled = torch.tensor([True, True, False])
    assert whiten_rewards(rewards, sampled).tolist() == [-1.0, 1.0, 3.0]
    flat = torch.tensor([2.0, 2.0, 5.0], dtype=torch.float64)
    assert whiten_rewards(flat, sampled).tolist() == [0.0, 0.0, 3.0]
