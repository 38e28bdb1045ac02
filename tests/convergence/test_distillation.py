"""A student learns on its own samples what its teacher knows, and nothing from a broken one.

From the teacher's log-probs of sampled tokens it learns a word; from the teacher's distribution at
each of them, to sort digits. What is judged is the median over seeds.
"""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.convergence.runs import (
    START,
    Reward,
    Row,
    before_and_after,
    continued,
    iterate,
    letters_right,
    line_of_policies,
    typical,
)
from tests.stages.conftest import Runner

UNSOLVED, SOLVED = 0.5, 0.7
WHOLE_VOCABULARY = 1000


def no_reward(_: Row) -> float:
    return 0.0


def is_sorted(row: Row) -> float:
    return float(row["response"] == "".join(sorted(row["prompt"][:-1])))


def distillation(
    student: Runner,
    teacher: Path,
    root: Path,
    seed: int,
    updates: int,
    update: dict[str, Any],
    **rollout: Any,
) -> Runner:
    return continued(
        student,
        root / str(seed),
        seed=seed,
        rl={
            "algorithm": "distill",
            "teacher": str(teacher),
            "iterations": line_of_policies(updates),
        },
        rollout={"max_new_tokens": 5, "batch_size": 512, **rollout},
        score={"reference": False},
        policy_update={
            "warmup_steps": 10,
            "epochs": 1,
            "kl_coef": 0.0,
            **update,
        },
    )


def learnt_word(student: Runner, teacher: Runner, root: Path, bar: float) -> float:
    """The share of letters that the last student of a typical run has right."""
    update = {"distill_top_k": 0, "learning_rate": 1e-2, "batch_size": 96}
    folder = teacher.root / START

    def quality(seed: int) -> float:
        runner = distillation(student, folder, root, seed, 12, update, prompts=12, samples=32)
        return after_learning(runner, letters_right)

    return typical(quality, bar)


def learnt_sorting(student: Runner, teacher: Path, root: Path, bar: float) -> float:
    """The share of digits that the last student of a typical run has sorted."""
    update = {"distill_top_k": WHOLE_VOCABULARY, "learning_rate": 5e-3, "batch_size": 48}

    def quality(seed: int) -> float:
        runner = distillation(student, teacher, root, seed, 6, update, prompts=60, samples=6)
        return after_learning(runner, is_sorted)

    return typical(quality, bar)


def after_learning(runner: Runner, quality: Reward) -> float:
    assert iterate(runner, no_reward) <= 50
    before, after = before_and_after(runner, quality)
    assert before < UNSOLVED
    return after


def test_the_word_is_learnt_from_log_probs_of_samples(
    any_word: Runner, the_word: Runner, tmp_path: Path
) -> None:
    assert learnt_word(any_word, the_word, tmp_path, SOLVED) > SOLVED


def test_the_word_is_not_learnt_from_what_the_teacher_likes_less(
    any_word: Runner, the_word: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reversed_sign(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
        return logprobs - teacher_logprobs

    monkeypatch.setattr("stages.learning.distillation.sampled_advantages", reversed_sign)
    assert learnt_word(any_word, the_word, tmp_path, UNSOLVED) < UNSOLVED


def test_sorting_is_learnt_from_distributions(
    shuffler: Runner, sorter: Runner, tmp_path: Path
) -> None:
    assert learnt_sorting(shuffler, sorter.root / START, tmp_path, SOLVED) > SOLVED


def test_sorting_is_not_learnt_from_a_teacher_that_has_learnt_nothing(
    shuffler: Runner, sorter: Runner, tmp_path: Path
) -> None:
    untaught = sorter.root / "artifacts/base"
    assert learnt_sorting(shuffler, untaught, tmp_path, UNSOLVED) < UNSOLVED
