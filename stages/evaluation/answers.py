"""A policy's answers to the held-out prompts, each judged and scored."""

import struct
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """One response, judged and scored."""

    response: str
    finish_reason: str
    length: int
    """Tokens."""
    reward: float
    correct: bool | None
    """None where nothing says what is right."""
    vote: str | None = None
    """What counts in a majority vote; None: it abstains."""

    def __post_init__(self) -> None:
        # As precise as on disk, so that what was read back can tie with what was not.
        (reward,) = struct.unpack("f", struct.pack("f", self.reward))
        object.__setattr__(self, "reward", reward)


@dataclass(frozen=True)
class Answered:
    """A held-out prompt with a policy's answers."""

    prompt_id: str
    prompt: str
    answer: str | None
    task: str | None
    greedy: Answer
    sampled: tuple[Answer, ...]

    @property
    def is_judged(self) -> bool:
        return self.greedy.correct is not None

    @property
    def num_right(self) -> int:
        """How many of the sampled responses are right."""
        return sum(bool(answer.correct) for answer in self.sampled)

    @property
    def pass_rate(self) -> float | None:
        return self.num_right / len(self.sampled) if self.is_judged and self.sampled else None
