"""A tool and a game are learnt from what the environment pays, and from nothing else.

What counts are games that nobody has played in training. The calculator: the policy starts as one
that calls the tool half of the time, and else says any number. The game: it starts with any guess,
whatever it was answered. Three guesses that pay no heed to the answers find at most three numbers
of seven; whoever wins more often has learnt to use them. Under rewards of other episodes nothing is
learnt. What is judged is the median over seeds.
"""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from stages.data.tokenizer import EOS
from stages.rewards.paid import PaidScorer
from tests.convergence.games import Segment, learnt, shown, wins
from tests.convergence.runs import typical
from tests.stages.conftest import Runner

CALCULATOR = {
    "environment": "calculator", "max_turns": 2, "max_observation_tokens": 6, "max_new_tokens": 14,
    "prompts": 32, "samples": 8,
}  # fmt: skip
GUESS = {
    "environment": "guess", "max_turns": 3, "max_observation_tokens": 4, "max_new_tokens": 8,
    "prompts": 64, "samples": 8,
}  # fmt: skip
HALF_OF_THE_TIME = 0.5
WITHOUT_HINTS = 3 / 7


@pytest.fixture(scope="module")
def tool_user(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """A policy that calls the calculator, or says any number. Not to be written to."""
    rng = random.Random(0)
    sums = [f"{a}{sign}{b}" for a in range(1, 10) for b in range(1, 10) for sign in "+-*"]
    rng.shuffle(sums)
    questions = [{"prompt": f"{of}=", "answer": str(eval(of))} for of in sums]
    turns = itertools.count()

    def episode(row: dict[str, str]) -> list[Segment]:
        number = f"{rng.randint(2, 18)}{EOS}"
        turn = next(turns)
        if turn % 40 == 0:
            return [("calc(+)", True), ("error", False), (number, True)]
        if turn % 2:
            return [(number, True)]
        answer = row["answer"]
        return [(f"calc({row['prompt'][:-1]})", True), (answer, False), (f"{answer}{EOS}", True)]

    return shown(
        tmp_path_factory.mktemp("tool_user"),
        questions[:200],
        questions[200:],
        episode,
        repeats=2,
        sft={"epochs": 16, "batch_size": 16, "learning_rate": 5e-3},
    )


@pytest.fixture(scope="module")
def guesser(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """A policy that says any number whatever it is told. Not to be written to."""
    rng = random.Random(0)
    names = ["".join(letters) + ":" for letters in itertools.product("abcdefgh", repeat=3)]
    rng.shuffle(names)
    questions = [{"prompt": name, "answer": "none"} for name in names]

    def episode(_: dict[str, str]) -> list[Segment]:
        number, said = rng.randint(1, 7), []
        for _ in range(3):
            guess = rng.randint(1, 7)
            hint = "<" if number < guess else ">"
            said += [(f"{guess}{EOS}", True), (hint, False)]
            if guess == number:
                break
        return said[:-1]

    return shown(
        tmp_path_factory.mktemp("guesser"),
        questions[:384],
        questions[384:],
        episode,
        repeats=2,
        sft={"epochs": 2, "batch_size": 32, "learning_rate": 3e-3},
    )


@pytest.fixture
def _rewards_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    score = PaidScorer.score

    def shuffled(self: PaidScorer, rows: Sequence[dict[str, float]]) -> list[float]:
        return rng.sample(score(self, rows), len(rows))

    monkeypatch.setattr(PaidScorer, "score", shuffled)


def wins_with_the_calculator(start: Runner, root: Path) -> float:
    """Of a typical policy after it has learnt."""

    def share(seed: int) -> float:
        run = learnt(start, root, seed, 8, CALCULATOR, rate=2e-3)
        assert wins(run, "sft") < HALF_OF_THE_TIME
        return wins(run, "fast")

    return typical(share, HALF_OF_THE_TIME)


def wins_at_guessing(start: Runner, root: Path, steps: int) -> float:
    def share(seed: int) -> float:
        run = learnt(start, root, seed, steps, GUESS, rate=7e-3)
        assert wins(run, "sft") < WITHOUT_HINTS
        return wins(run, "fast")

    return typical(share, WITHOUT_HINTS)


def test_a_policy_learns_to_call_the_calculator(tool_user: Runner, tmp_path: Path) -> None:
    assert wins_with_the_calculator(tool_user, tmp_path) > HALF_OF_THE_TIME


@pytest.mark.usefixtures("_rewards_of_others")
def test_the_calculator_is_not_learnt_from_the_rewards_of_others(
    tool_user: Runner, tmp_path: Path
) -> None:
    assert wins_with_the_calculator(tool_user, tmp_path) < HALF_OF_THE_TIME


def test_a_policy_learns_to_guess_by_what_it_is_told(guesser: Runner, tmp_path: Path) -> None:
    assert wins_at_guessing(guesser, tmp_path, steps=12) > WITHOUT_HINTS


@pytest.mark.usefixtures("_rewards_of_others")
def test_guessing_is_not_learnt_from_the_rewards_of_others(guesser: Runner, tmp_path: Path) -> None:
    assert wins_at_guessing(guesser, tmp_path, steps=8) < WITHOUT_HINTS
