"""`lockstep scores`: two scorings of the same rollouts, from the records of a real history."""

from dataclasses import replace

import pytest

from tests.lineage.conftest import Asker


@pytest.fixture
def scores(ask: Asker) -> Asker:
    """Questions to `lockstep scores`."""
    return replace(ask, command="scores")


def test_a_scoring_that_is_kinder_by_one_orders_nothing_differently(scores: Asker) -> None:
    answered = scores("faster:iter_002", "kinder:iter_002", "--json")
    assert answered.status == 0
    answer = answered.json
    said = answer["agreement"]
    assert said["num_rows"] == 16
    assert said["num_pairs"] == 8
    assert said["mean_difference"] == pytest.approx(1.0, abs=1e-5)
    assert said["pearson"] == pytest.approx(1.0, abs=1e-5)
    assert said["num_reversed"] == 0
    assert len(answer["largest"]) == 10
    assert answer["largest"][0]["difference"] == pytest.approx(1.0, abs=1e-5)
    assert {"prompt_id", "sample_index", "prompt", "response"} <= set(answer["largest"][0])
    assert answer["one"]["hash"] != answer["other"]["hash"]


def test_the_text_says_the_same(scores: Asker) -> None:
    out = scores("faster:iter_002", "kinder:iter_002", "--limit", "2").out
    assert "16 responses of artifacts/rollouts/iter_002.parquet" in out
    assert "B - A +1" in out
    assert "0 of 8 pairs of a prompt's responses reversed (0.0%)" in out
    assert out.count("prompt ") == 2


def test_what_one_source_said_is_compared_alone(scores: Asker) -> None:
    words = ("faster:iter_002", "kinder:iter_002", "--source", "reward_model", "--json")
    said = scores(*words).json
    assert said["agreement"]["mean_difference"] == 0.0, "the code adds to the sum alone"
    assert said["largest"] == []
    refused = scores("faster:iter_002", "kinder:iter_002", "--source", "judge")
    assert refused.status == 2
    assert "has no source 'judge'; it has reward_model" in refused.err


def test_scorings_of_other_rollouts_are_refused(scores: Asker) -> None:
    refused = scores("first:iter_002", "faster:iter_002")
    assert refused.status == 2
    assert "score different rollouts" in refused.err
    assert scores("first:iter_001", "faster:iter_001").status == 0, "nothing before has changed"


def test_what_is_no_scoring_is_refused(scores: Asker) -> None:
    refused = scores("rollouts@iter_001", "iter_001")
    assert refused.status == 2
    assert "was produced by rollout@iter_001: name scores" in refused.err
    assert "git knows no revision" in scores("nowhere:iter_001", "iter_001").err
