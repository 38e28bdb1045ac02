"""repetition: minus the share of a response's word sequences that repeat an earlier one.

A response of which no sequence of `ngram` words comes twice gets 0; one that says the same over and
over comes near -1. Words count without regard to case.
"""

from collections.abc import Callable
from pathlib import Path

from stages.contracts.reward_rules import Repetition
from stages.rewards.given import Row


def open_rule(params: Repetition, _folder: Path) -> Callable[[Row], float]:
    return lambda row: 0.0 - repeated_share(row["response"].lower().split(), params.ngram)


def repeated_share(words: list[str], ngram: int) -> float:
    """The share of n-grams that repeat an earlier one."""
    sequences = [tuple(words[i : i + ngram]) for i in range(len(words) - ngram + 1)]
    return 1 - len(set(sequences)) / len(sequences) if sequences else 0.0
