"""Environments in processes of their own, which are killed where one hangs, and replaced.

A process has the environments of many episodes and answers one question at a time. Where it ended
because of one of them, the others are made anew in the next process, and hear again what they were
told: an episode does not fail because of another.
"""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from stages.environments import isolated_worker
from stages.environments.environment import Environment, NoAnswer, Observation
from stages.environments.observations import read_back
from stages.environments.spoken import as_json
from stages.rewards.isolated import CannotScore, Isolated


class Lane:
    """A process, and whose turn it is to ask it."""

    def __init__(self, environment: str, folder: Path) -> None:
        order = {"environment": environment, "folder": str(folder)}
        self.process = Isolated(order, isolated_worker.__file__)
        self.turn = asyncio.Lock()
        self.seconds = 0.0
        """How long the next answer may take."""
        self._numbers = count()

    def new_number(self) -> int:
        """Of an episode."""
        return next(self._numbers)

    def start(self) -> None:
        """Have the process ready; what it imports is no part of an answer."""
        try:
            self.process.start()
        except CannotScore as refused:
            raise NoAnswer(str(refused)) from None


class IsolatedEnvironment(Environment):
    """What stands for an environment in a process."""

    def __init__(self, lane: Lane) -> None:
        self._lane, self._number = lane, lane.new_number()
        self._begun: Sequence[Any] = ()
        self._heard: list[tuple[str, Observation]] = []
        self._start = 0
        """Which start of the process has it."""

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        self._begun = row, seed
        self._ask({"reset": self._begun})
        self._start = self._lane.process.starts

    def step(self, action: str) -> Observation:
        self._be_there()
        observed = self._told(action)
        self._heard.append((action, observed))
        return observed

    def close(self) -> None:
        if self._lane.process.runs and self._start == self._lane.process.starts:
            self._ask({"close": True})

    def _be_there(self) -> None:
        """In the process that lives, where another episode has ended the one before."""
        self._lane.start()
        if self._start == self._lane.process.starts:
            return
        self._ask({"reset": self._begun})
        self._start = self._lane.process.starts
        for action, before in self._heard:
            if (observed := self._told(action)) != before:
                raise NoAnswer(
                    f"made anew after another episode had ended its process, it answered the "
                    f"action {action!r} with {observed}, and before with {before}"
                )

    def _told(self, action: str) -> Observation:
        return read_back(self._ask(as_json(action))["observation"])

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self._lane.process.ask({"episode": self._number, **message}, self._lane.seconds)
        except CannotScore as refused:
            raise NoAnswer(str(refused)) from None
