"""Environments behind a server of OpenEnv, played in text.

Each episode has a session of its own. Actions and observations are objects of the server's; two
methods, which a subclass may replace, turn a policy's text into one and the other into text.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from stages.environments.environment import NoAnswer, Observation
from stages.environments.packages import require
from stages.environments.started import Started, plain_text
from stages.environments.tool_calls import without_reasoning
from stages.environments.variables import filled, redacted

_LONGEST_S = 24 * 3600.0
"""The time limit is that of the episodes; the client has to have one, too."""


class OpenEnv(Started):
    """One episode. Subclasses say of which server."""

    url: ClassVar[str] = ""
    """Of the server; `${NAME}` stands for an environment variable."""
    action_field: ClassVar[str] = "message"
    """The field of an action that has the policy's turn."""
    invalid_reward: ClassVar[float] = 0.0
    """Of a turn that is no action."""

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        require("openenv", "openenv")

    def parse(self, turn: str) -> Mapping[str, Any]:
        """A turn as the fields of an action; ValueError says to the policy what is wrong."""
        return {self.action_field: without_reasoning(turn)}

    def show(self, observation: Mapping[str, Any]) -> str:
        """An observation as text: as JSON, unless it is one text alone."""
        fields = list(observation.values())
        return plain_text(fields[0] if len(fields) == 1 else observation)

    def begin(self, seed: int) -> str:
        from openenv.core import GenericEnvClient

        url = filled(self.url)
        self._client = GenericEnvClient(url, message_timeout_s=_LONGEST_S)
        return self.show(self._asked(self._client.reset, seed=seed).observation)

    def step(self, action: str) -> Observation:
        try:
            fields = dict(self.parse(action))
        except ValueError as problem:
            return Observation(f"error: {problem}", reward=self.invalid_reward)
        result = self._asked(self._client.step, fields)
        return Observation(self.show(result.observation), float(result.reward or 0.0), result.done)

    def close(self) -> None:
        if hasattr(self, "_client"):
            self._client.close()

    def _asked(self, ask: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return ask(*arguments, **named)
        except Exception as error:
            why = f"OpenEnv server {self.url}: {type(error).__name__}: {error}"
            raise NoAnswer(redacted(why + _remedy(why), [self.url])) from None


def _remedy(why: str) -> str:
    if "VALIDATION_ERROR" in why:
        return (
            "; it has no such action: look at the fields that `parse` returns, and raise "
            "ValueError there for turns that are none"
        )
    # A full server says so and closes: who asks in between only learns that it is closed.
    if "CAPACITY_REACHED" in why or "ConnectionClosedOK" in why:
        return "; if it is full, give it a max_concurrent_envs of as many episodes as are under way"
    return ""
