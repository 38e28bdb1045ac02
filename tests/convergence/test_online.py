"""Fused steps find the word, too, from samples of the policy of one step before."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from stages import online
from tests.convergence.runs import continued, letters_right, logprobs_by
from tests.stages.conftest import Runner

UNSOLVED, SOLVED = 0.5, 0.9


def test_the_word_is_found_by_samples_that_are_one_step_late(
    any_word: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = continued(
        any_word,
        tmp_path,
        rl={
            "algorithm": "grpo",
            "reward": "verifier",
            "teacher": "artifacts/base",
            "online": {"fast": {"policy": "sft", "steps": 40}},
        },
        rollout={"prompts": 12, "samples": 16, "max_new_tokens": 5, "batch_size": 512},
        policy_update={
            "learning_rate": 5e-3,
            "warmup_steps": 10,
            "epochs": 1,
            "batch_size": 192,
            "kl_coef": 0.0,
            "max_kl": 100.0,
            "mismatch": "token_truncate",
            "max_logprob_gap": 1.0,
            "min_effective_samples": 0.1,
        },
        online={"overlap": True},
    )

    def score(_: Any, inputs: Any, rows: Any, *__: Any) -> Any:
        scores = [
            {
                "prompt_id": row["prompt_id"],
                "sample_index": row["sample_index"],
                "reward": letters_right(row),
                "by_source": [],
                "ref_logprobs": logprobs,
            }
            for row, logprobs in zip(
                rows, logprobs_by(runner, inputs["reference"], rows), strict=True
            )
        ]
        return scores, {}

    monkeypatch.setattr(online, "score", score)
    runner.run("online@fast")
    lines = (tmp_path / "jobs/online@fast/metrics.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["metrics"]["reward_mean"] for line in lines]
    assert rewards[0] < UNSOLVED
    assert statistics.fmean(rewards[-3:]) > SOLVED
    gaps = [json.loads(line)["metrics"]["logprob_gap_mean"] for line in lines]
    assert gaps[0] < 1e-4 < max(gaps[1:]), "later samples come from another policy than learns"
