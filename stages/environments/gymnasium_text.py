"""Environments of Gymnasium, played in text.

The policy's turn is parsed to an action, and observations are written as text: two methods, which a
subclass may replace. A turn that is no action is told to the policy, and the environment does not
see it.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from stages.environments.environment import Observation
from stages.environments.packages import require
from stages.environments.started import Started, plain_text
from stages.environments.tool_calls import without_reasoning


class GymnasiumText(Started):
    """One episode. Subclasses say of which environment."""

    id: ClassVar[str] = ""
    """For `gymnasium.make`: FrozenLake-v1, or module:Name-v0, which imports the module first."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """Other arguments of `gymnasium.make`."""
    invalid_reward: ClassVar[float] = 0.0
    """Of a turn that is no action."""

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        require("gymnasium", "tools")

    def parse(self, turn: str) -> Any:
        """A turn as an action; ValueError says to the policy what is wrong.

        Of a `Discrete` space it is the last whole number of the turn, of a `Text` space the turn.
        """
        from gymnasium.spaces import Discrete, Text

        said, space = without_reasoning(turn), self._game.action_space
        if isinstance(space, Text):
            return said
        if not isinstance(space, Discrete):
            raise NotImplementedError(f"say in `parse` how a turn is an action of {space}")
        numbers = re.findall(r"-?\d+", said)
        if not numbers:
            raise ValueError("say the number of an action")
        return int(numbers[-1])

    def show(self, observation: Any) -> str:
        """An observation as text."""
        return plain_text(observation)

    def begin(self, seed: int) -> str:
        import gymnasium

        self._game = gymnasium.make(self.id, **self.settings)
        observation, _ = self._game.reset(seed=seed)
        return self.show(observation)

    def step(self, action: str) -> Observation:
        try:
            parsed = self.parse(action)
            if not self._game.action_space.contains(parsed):
                raise ValueError(f"an action is one of {self._game.action_space}")
        except ValueError as problem:
            return Observation(f"error: {problem}", reward=self.invalid_reward)
        observation, reward, ended, truncated, _ = self._game.step(parsed)
        return Observation(self.show(observation), float(reward), bool(ended or truncated))

    def close(self) -> None:
        if hasattr(self, "_game"):
            self._game.close()
