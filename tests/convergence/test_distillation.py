"""A student learns on its own samples what its teacher knows, and nothing from a broken one.

From the teacher's log-probs of sampled tokens it learns a word; from the teacher's distribution at
each of them, to sort digits.
"""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.convergence.runs import (
    START,
    Row,
    before_and_after,
    continued,
    iterate,
    letters_right,
    line_of_policies,
)
from tests.stages.conftest import Runner

UNSOLVED, SOLVED = 0.5, 0.85
WHOLE_VOCABULARY = 1000


def no_reward(_: Row) -> float:
    return 0.0


def is_sorted(row: Row) -> float:
    return float(row["response"] == "".join(sorted(row["prompt"][:-1])))


def distillation(
    student: Runner, teacher: Path, root: Path, update: dict[str, Any], **rollout: Any
) -> Runner:
    return continued(
        student,
        root,
        rl={
            "algorithm": "distill",
            "teacher": str(teacher),
            "iterations": line_of_policies(12),
        },
        rollout={"max_new_tokens": 5, "batch_size": 512, **rollout},
        policy_update={
            "warmup_steps": 10,
            "epochs": 1,
            "batch_size": 96,
            "kl_coef": 0.0,
            "max_kl": 100.0,
            **update,
        },
    )


def learn_the_word(student: Runner, teacher: Runner, root: Path) -> Runner:
    update = {"distill_top_k": 0, "learning_rate": 1e-2}
    runner = distillation(student, teacher.root / START, root, update, prompts=12, samples=32)
    assert iterate(runner, no_reward) <= 50
    return runner


def learn_to_sort(student: Runner, teacher: Path, root: Path) -> Runner:
    update = {"distill_top_k": WHOLE_VOCABULARY, "learning_rate": 5e-3}
    runner = distillation(student, teacher, root, update, prompts=60, samples=6)
    assert iterate(runner, no_reward) <= 50
    return runner


def test_the_word_is_learnt_from_log_probs_of_samples(
    any_word: Runner, the_word: Runner, tmp_path: Path
) -> None:
    before, after = before_and_after(learn_the_word(any_word, the_word, tmp_path), letters_right)
    assert before < UNSOLVED
    assert after > SOLVED


def test_the_word_is_not_learnt_from_what_the_teacher_likes_less(
    any_word: Runner, the_word: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reversed_sign(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
        return logprobs - teacher_logprobs

    monkeypatch.setattr("stages.learning.distillation.sampled_advantages", reversed_sign)
    _, after = before_and_after(learn_the_word(any_word, the_word, tmp_path), letters_right)
    assert after < UNSOLVED


def test_sorting_is_learnt_from_distributions(
    shuffler: Runner, sorter: Runner, tmp_path: Path
) -> None:
    before, after = before_and_after(
        learn_to_sort(shuffler, sorter.root / START, tmp_path), is_sorted
    )
    assert before < UNSOLVED
    assert after > SOLVED


def test_sorting_is_not_learnt_from_a_teacher_that_has_learnt_nothing(
    shuffler: Runner, sorter: Runner, tmp_path: Path
) -> None:
    untaught = sorter.root / "artifacts/base"
    _, after = before_and_after(learn_to_sort(shuffler, untaught, tmp_path), is_sorted)
    assert after < UNSOLVED
