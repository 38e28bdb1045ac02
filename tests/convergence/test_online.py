"""Fused steps find the word, too, from samples of the policy of one step before."""

import statistics
from pathlib import Path
from typing import Any

import pytest

from stages import online
from tests.convergence.runs import continued, letters_right, typical
from tests.stages.conftest import Runner

UNSOLVED, SOLVED = 0.5, 0.6


def score(_: Any, __: Any, rows: Any, *___: Any) -> Any:
    scores = [
        {
            "prompt_id": row["prompt_id"],
            "sample_index": row["sample_index"],
            "reward": letters_right(row),
            "by_source": [],
            "ref_logprobs": None,
        }
        for row in rows
    ]
    return scores, {}


def test_the_word_is_found_by_samples_that_are_one_step_late(
    any_word: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online, "score", score)

    def learnt(seed: int) -> float:
        runner = continued(
            any_word,
            tmp_path / str(seed),
            seed=seed,
            rl={
                "algorithm": "grpo",
                "reward": "verifier",
                "online": {"fast": {"policy": "sft", "steps": 36}},
            },
            rollout={"prompts": 12, "samples": 16, "max_new_tokens": 5, "batch_size": 512},
            score={"reference": False},
            policy_update={
                "learning_rate": 4e-3,
                "warmup_steps": 10,
                "epochs": 1,
                "batch_size": 192,
                "kl_coef": 0.0,
                "mismatch": "token_truncate",
                "max_logprob_gap": 100.0,
                "min_effective_samples": 0.0,
            },
            online={"overlap": True},
        )
        runner.run("online@fast")
        steps = runner.steps("online@fast")
        rewards = [step["reward_mean"] for step in steps]
        gaps = [step["logprob_gap_mean"] for step in steps]
        assert rewards[0] < UNSOLVED
        assert gaps[0] < 1e-4 < max(gaps[1:]), "later samples come from another policy than learns"
        return statistics.fmean(rewards[-3:])

    assert typical(learnt, bar=SOLVED) > SOLVED
