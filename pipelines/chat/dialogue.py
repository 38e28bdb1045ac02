"""What is asked of a policy: a dialogue, and how its answer is drawn.

An answer is a function of the policy, the messages and these options: the same give the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipelines.base.errors import LockstepError
from stages.contracts.params import Params

Message = Mapping[str, str]
"""`role` (system, user or assistant) and `content`, as chat templates read them."""


@dataclass(frozen=True)
class Options:
    """How an answer is drawn."""

    seed: int
    temperature: float
    """0: always the likeliest token."""
    top_p: float
    top_k: int
    min_p: float
    max_new_tokens: int

    @classmethod
    def of_rollout(cls, params: Params) -> "Options":
        """As rollout samples."""
        rollout = params.rollout
        return cls(
            params.seed,
            rollout.temperature,
            rollout.top_p,
            rollout.top_k,
            rollout.min_p,
            rollout.max_new_tokens,
        )

    def changed(self, **values: int | float | None) -> "Options":
        """With the values that are given; LockstepError where one is out of its range."""
        changed = replace(self, **{k: v for k, v in values.items() if v is not None})  # type: ignore[arg-type]
        for wrong, said in (
            (not 0 <= changed.seed < 2**63, "the seed is a whole number from 0 up"),
            (not 0 <= changed.temperature < float("inf"), "the temperature is a number from 0 up"),
            (not 0 < changed.top_p <= 1, "top-p is a number above 0, and at most 1"),
            (changed.max_new_tokens < 1, "an answer has at least 1 token"),
        ):
            if wrong:
                raise LockstepError(f"{said}: change what you asked for")
        return changed

    def order(self) -> dict[str, Any]:
        """As the engine is asked."""
        greedy = self.temperature == 0
        cuts = {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        return {
            "seed": None if greedy else self.seed,
            "max_new_tokens": self.max_new_tokens,
            # What is cut off does not matter to the likeliest.
            "sampling": {} if greedy else {"temperature": self.temperature, **cuts},
        }


@dataclass(frozen=True)
class Answer:
    """What a policy said, and what it was."""

    text: str
    ids: Sequence[int]
    num_prompt: int
    """Tokens of the dialogue."""
    num_tokens: int
    finish_reason: str
    """`stop`: an end token; `length`: the limit; `stopped`: somebody asked for it."""
    seed: int
    """Of its random numbers, as in a row of rollouts: a hash of the seed and the turn; 0 where
    greedily."""
