"""An environment: it answers a policy's turns with observations and rewards.

One object plays one episode. The row's prompt opens it; the policy speaks, `step` answers with what
the policy observes next, and so on until the environment says that it is done, or the policy's
tokens or turns are used up. The episode's reward is the sum of what its steps paid.

An environment must be a function of (row, seed, actions): the seed is the only randomness that it
may use. It is the same for every sample of a prompt, in every iteration and in evaluation, so that
samples of one prompt are comparable.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Observation:
    """An environment's answer to a turn."""

    text: str = ""
    """What the policy reads next; unused where the episode is over."""
    reward: float = 0.0
    """The reward of the turn."""
    done: bool = False
    """Whether the episode is over."""
    ids: tuple[int, ...] | None = None
    """What the policy reads next, where the environment says it as ids: all of it, with what else a
    chat template puts around the text, which is then what the ids say."""


def right_answer(row: Mapping[str, Any]) -> str:
    """The row's `answer`; ValueError where it has none."""
    if row["answer"] is None:
        raise ValueError("the row has no `answer` to compare with: add it to the data")
    return str(row["answer"]).strip()


class NoAnswer(Exception):
    """An environment has not answered; the message says why."""


class Environment(ABC):
    """One episode. It is made without arguments."""

    stops: ClassVar[tuple[str, ...]] = ()
    """What ends a turn besides the end token, each one token of the policy's tokenizer. After such
    a stop the policy goes on in the same message, and the observation is put there as it is. After
    the end token the observation is a message of its own, as the chat template has it."""
    role: ClassVar[str] = "user"
    """The role of these messages, for the chat template."""
    reads_ids: ClassVar[bool] = False
    """Whether actions are to know the ids that they are the text of (spoken.py), and the row to
    have `prompt_ids`, too."""

    @abstractmethod
    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Begin: the row has `prompt_id`, `prompt`, `answer`, and `extra`, its other columns."""

    @abstractmethod
    def step(self, action: str) -> Observation:
        """Answer a turn; `action` is the policy's text in it, without special tokens."""

    def close(self) -> None:  # noqa: B027
        """Let go of what the episode had; nothing is asked afterwards.

        Also where it has failed, even in `reset`.
        """
