"""Policies that know the form of an answer and not yet the answer, to learn from."""

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.convergence.runs import WORD, prepared
from tests.stages.conftest import Runner

LETTERS = "abcd"
PROMPTS = ["".join(pair) + ":" for pair in itertools.product(LETTERS, repeat=2)]
NUMBERS = ["".join(digits) + "=" for digits in itertools.product("1234", repeat=3)]
SORTING = {"intermediate_size": 64, "num_kv_heads": 2}
"""What a model needs beyond the smallest to attend to three digits."""


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


def words(rng: random.Random, shortest: int, longest: int) -> str:
    return "".join(rng.choices(LETTERS, k=rng.randint(shortest, longest)))


def taught(
    root: Path, prompts: Sequence[str], answer: Callable[[str], str], repeats: int, **params: Any
) -> Runner:
    """A run up to a policy that was shown an answer to all but two prompts, several times."""
    *trained, held_out, last = prompts
    pair = {"chosen": answer(last), "rejected": ""}
    files = {
        "demonstrations": [
            {"prompt": prompt, "completion": answer(prompt)} for prompt in trained * repeats
        ],
        "preferences": [{"prompt": trained[0], **pair}],
        "prompts": [{"prompt": prompt} for prompt in trained],
        "held_out": [{"prompt": held_out, "answer": answer(held_out)}],
        "held_out_preferences": [{"prompt": last, **pair}],
    }
    return prepared(root, files, **params)


@pytest.fixture(scope="session")
def any_word(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """A policy that answers with any three letters. Not to be written to."""
    rng = random.Random(0)
    return taught(
        tmp_path_factory.mktemp("any_word"),
        PROMPTS,
        lambda _: words(rng, 3, 3),
        repeats=16,
        sft={"epochs": 8, "batch_size": 16},
    )


@pytest.fixture(scope="session")
def the_word(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """A policy that answers with WORD. Not to be written to."""
    return taught(
        tmp_path_factory.mktemp("the_word"),
        PROMPTS,
        lambda _: WORD,
        repeats=16,
        sft={"epochs": 6, "batch_size": 16},
    )


@pytest.fixture(scope="session")
def shuffler(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """A policy that answers with the prompt's digits in any order. Not to be written to."""
    rng = random.Random(0)
    return taught(
        tmp_path_factory.mktemp("shuffler"),
        NUMBERS,
        lambda prompt: "".join(rng.sample(prompt[:-1], 3)),
        repeats=4,
        model=SORTING,
        sft={"epochs": 13, "batch_size": 32, "learning_rate": 5e-3},
    )


@pytest.fixture(scope="session")
def sorter(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """A policy that answers with the prompt's digits in order. Not to be written to."""
    return taught(
        tmp_path_factory.mktemp("sorter"),
        NUMBERS,
        lambda prompt: "".join(sorted(prompt[:-1])),
        repeats=4,
        model=SORTING,
        sft={"epochs": 15, "batch_size": 32, "learning_rate": 1e-2},
    )


@pytest.fixture(scope="session")
def either_style(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """A policy that ends a word with ! as often as with a full stop; ! is what is preferred.

    Not to be written to.
    """
    rng = random.Random(0)
    trained, held_out = PROMPTS[:12], PROMPTS[12:]

    def pairs(prompts: list[str]) -> list[dict[str, str]]:
        return [
            {
                "prompt": prompt,
                "chosen": words(rng, 1, 3) + "!",
                "rejected": words(rng, 1, 3) + ".",
            }
            for prompt in prompts * 8
        ]

    files = {
        "demonstrations": [
            {"prompt": prompt, "completion": words(rng, 1, 3) + mark}
            for prompt in trained * 12
            for mark in "!."
        ],
        "preferences": pairs(trained),
        "prompts": [{"prompt": prompt} for prompt in trained],
        "held_out": [{"prompt": prompt, "answer": "!"} for prompt in held_out],
        "held_out_preferences": pairs(held_out),
    }
    return prepared(
        tmp_path_factory.mktemp("either_style"), files, sft={"epochs": 4, "batch_size": 16}
    )
