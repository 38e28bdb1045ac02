"""Every way of learning from rewards finds a word, and does not once its key term is broken.

The task: answer any prompt with WORD, within 50 optimizer steps; the reward is the share of letters
that are right. The policy starts with any three letters of four, that is with a quarter of them
right or less; a broken one may settle on any word, which has a third more or fewer of them. Where
responses to one prompt are compared, half of the prompts pay PREMIUM for any answer, so that what
counts is the comparison. What is judged is the median over seeds.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.algorithms.advantages import discounted_returns, gae, whiten
from stages.context import StageError
from stages.learning.best_of_n import the_best
from stages.learning.online_pairs import best_and_worst
from tests.convergence.runs import (
    Row,
    before_and_after,
    collate_one_off,
    continued,
    iterate,
    letters_right,
    line_of_policies,
    typical,
)
from tests.stages.conftest import Runner

PREMIUM = 10.0
UNSOLVED, SOLVED = 0.5, 0.6


def letters_right_and_premium(row: Row) -> float:
    return letters_right(row) + PREMIUM * (row["prompt"][0] in "ac")


def one_group_for_all(rollouts: Any) -> Tensor:
    return torch.zeros(len(rollouts), dtype=torch.long)


def reward_itself(rewards: Tensor, _: Tensor) -> Tensor:
    return rewards


def advantages_of_the_next_response(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    advantages, returns = gae(*arguments, **options)
    return advantages.roll(-1, dims=0), returns


def whitened_one_by_one(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    returns = discounted_returns(rewards, mask, gamma=gamma)
    return torch.cat([whiten(returns[i : i + 1], mask[i : i + 1]) for i in range(len(mask))])


def whichever_came_first(rollouts: Any) -> Any:
    return best_and_worst([{**row, "reward": row["sample_index"]} for row in rollouts])


def the_worst(rollouts: Any, keep: int) -> Any:
    return the_best([{**row, "reward": -row["reward"]} for row in rollouts], keep)


@dataclass(frozen=True)
class Case:
    """An algorithm, what is particular to it, and the break that it must not survive."""

    algorithm: str
    breaks: str
    broken: Callable[..., Any]
    reward: Callable[[Row], float] = letters_right
    rollout: dict[str, Any] = field(default_factory=dict)
    update: dict[str, Any] = field(default_factory=dict)
    updates: int = 6


CASES = [
    Case(
        "ppo",
        "experience.gae",
        advantages_of_the_next_response,
        update={
            "gae_lambda": 0.95,
            "learning_rate": 7e-3,
            "critic_learning_rate": 5e-3,
            "critic_warmup_epochs": 4,
        },
    ),
    Case("grpo", "experience.group_numbers", one_group_for_all, letters_right_and_premium),
    Case("rloo", "experience.leave_one_out", reward_itself, letters_right_and_premium),
    Case("reinforce_pp", "experience.reinforce_plus_plus", whitened_one_by_one),
    Case(
        "reinforce_pp_baseline",
        "experience.group_centred",
        reward_itself,
        letters_right_and_premium,
    ),
    Case(
        "remax",
        "experience.against_baseline",
        reward_itself,
        letters_right_and_premium,
        rollout={"greedy_baseline": True},
    ),
    Case(
        "dpo",
        "online_pairs.best_and_worst",
        whichever_came_first,
        update={"dpo_beta": 2.0, "batch_size": 12, "epochs": 4},
        # A pair of each prompt an update; a policy that always finds the word would have none left.
        updates=9,
    ),
    Case(
        "best_of_n",
        "best_of_n.the_best",
        the_worst,
        update={"batch_size": 6, "keep_best": 4, "learning_rate": 1e-2},
    ),
]
BY_ALGORITHM = pytest.mark.parametrize("case", CASES, ids=[case.algorithm for case in CASES])


def run_of(case: Case, start: Runner, root: Path, seed: int = 1, **update: Any) -> Runner:
    return continued(
        start,
        root / str(seed),
        seed=seed,
        rl={
            "algorithm": case.algorithm,
            "reward": "verifier",
            "iterations": line_of_policies(case.updates),
        },
        rollout={
            "prompts": 12,
            "samples": 32,
            "max_new_tokens": 5,
            "batch_size": 512,
            **case.rollout,
        },
        score={"reference": False},
        policy_update={
            "learning_rate": 5e-3,
            "warmup_steps": 10,
            "epochs": 1,
            "batch_size": 48,
            "kl_coef": 0.0,
            **case.update,
            **update,
        },
    )


def learnt(case: Case, start: Runner, root: Path, bar: float, **update: Any) -> float:
    """The share of letters that the last policy of a typical run has right."""

    def quality(seed: int) -> float:
        runner = run_of(case, start, root, seed, **update)
        assert iterate(runner, case.reward) <= 50
        before, after = before_and_after(runner, letters_right)
        assert before < UNSOLVED
        return after

    return typical(quality, bar)


@BY_ALGORITHM
def test_the_word_is_found_within_fifty_steps(case: Case, any_word: Runner, tmp_path: Path) -> None:
    assert learnt(case, any_word, tmp_path, SOLVED) > SOLVED


@BY_ALGORITHM
def test_the_word_is_not_found_without_the_key_term(
    case: Case, any_word: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"stages.learning.{case.breaks}", case.broken)
    assert learnt(case, any_word, tmp_path, UNSOLVED) < UNSOLVED


@pytest.fixture
def one_position_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.data.segments.collate", collate_one_off)


GRPO = next(case for case in CASES if case.algorithm == "grpo")


@pytest.mark.usefixtures("one_position_off")
def test_log_probs_read_one_position_off_are_refused(any_word: Runner, tmp_path: Path) -> None:
    with pytest.raises(StageError, match="trainer and sampler log-probs differ"):
        iterate(run_of(GRPO, any_word, tmp_path), GRPO.reward)


@pytest.mark.usefixtures("one_position_off")
def test_the_word_is_not_found_by_log_probs_one_position_off(
    any_word: Runner, tmp_path: Path
) -> None:
    loose = {"max_logprob_gap": 100.0, "min_effective_samples": 0.0}
    assert learnt(GRPO, any_word, tmp_path, UNSOLVED, **loose) < UNSOLVED
