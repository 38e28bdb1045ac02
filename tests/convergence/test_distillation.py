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


def learn_the_word(student: Runner, teacher: Runner, root: Path, seed: int) -> Runner:
    update = {"distill_top_k": 0, "learning_rate": 1e-2, "batch_size": 96}
    runner = distillation(
        student, teacher.root / START, root, seed, 12, update, prompts=12, samples=32
    )
    assert iterate(runner, no_reward) <= 50
    return runner


def learn_to_sort(student: Runner, teacher: Path, root: Path, seed: int) -> Runner:
    update = {"distill_top_k": WHOLE_VOCABULARY, "learning_rate": 5e-3, "batch_size": 48}
    runner = distillation(student, teacher, root, seed, 6, update, prompts=60, samples=6)
    assert iterate(runner, no_reward) <= 50
    return runner


def test_the_word_is_learnt_from_log_probs_of_samples(
    any_word: Runner, the_word: Runner, tmp_path: Path
) -> None:
    def learnt(seed: int) -> float:
        runner = learn_the_word(any_word, the_word, tmp_path, seed)
        before, after = before_and_after(runner, letters_right)
        assert before < UNSOLVED
        return after

    assert typical(learnt, bar=SOLVED) > SOLVED


def test_the_word_is_not_learnt_from_what_the_teacher_likes_less(
    any_word: Runner, the_word: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reversed_sign(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
        return logprobs - teacher_logprobs

    def learnt(seed: int) -> float:
        runner = learn_the_word(any_word, the_word, tmp_path, seed)
        return before_and_after(runner, letters_right)[1]

    monkeypatch.setattr("stages.learning.distillation.sampled_advantages", reversed_sign)
    assert typical(learnt, bar=UNSOLVED) < UNSOLVED


def test_sorting_is_learnt_from_distributions(
    shuffler: Runner, sorter: Runner, tmp_path: Path
) -> None:
    def learnt(seed: int) -> float:
        runner = learn_to_sort(shuffler, sorter.root / START, tmp_path, seed)
        before, after = before_and_after(runner, is_sorted)
        assert before < UNSOLVED
        return after

    assert typical(learnt, bar=SOLVED) > SOLVED


def test_sorting_is_not_learnt_from_a_teacher_that_has_learnt_nothing(
    shuffler: Runner, sorter: Runner, tmp_path: Path
) -> None:
    untaught = sorter.root / "artifacts/base"

    def learnt(seed: int) -> float:
        return before_and_after(learn_to_sort(shuffler, untaught, tmp_path, seed), is_sorted)[1]

    assert typical(learnt, bar=UNSOLVED) < UNSOLVED
