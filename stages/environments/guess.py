"""A game: guess a number from 1 to 7.

The number is drawn from the seed. A guess is the last digit of a turn; it is answered with `<`
where the number is lower, `>` where it is higher. Finding it pays 1 and ends the episode; so does,
for nothing, a turn without a digit. Three guesses are enough for whoever halves what is left
(`rollout.max_turns: 3`).
"""

import re
from collections.abc import Mapping
from random import Random
from typing import Any

from stages.environments.environment import Environment, Observation

HIGHEST = 7


class Guess(Environment):
    """One number to be found."""

    def reset(self, row: Mapping[str, Any], seed: int) -> None:  # noqa: ARG002
        self._number = Random(seed).randint(1, HIGHEST)

    def step(self, action: str) -> Observation:
        digits = re.findall(r"\d", action)
        if not digits:
            return Observation(done=True)
        guess = int(digits[-1])
        if guess == self._number:
            return Observation(reward=1.0, done=True)
        return Observation("<" if self._number < guess else ">")
