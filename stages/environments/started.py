"""Environments that say something before the policy does: a board, a room, a hand of cards.

An episode opens with the row's prompt, so the first observation has to be in it.
`write_prompts.py` writes rows with it, each with the `seed` that it belongs to; when an episode
begins, the prompt has to have what that seed shows.
"""

import json
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from stages.environments.environment import Environment, NoAnswer

LARGEST_SEED = 2**31
"""Some environments take no larger ones."""


class Started(Environment):
    """One episode of an environment that begins with an observation."""

    instructions: ClassVar[str] = ""
    """What prompts say before the first observation."""
    in_prompt: ClassVar[bool] = True
    """False where prompts need not have the first observation."""

    @abstractmethod
    def begin(self, seed: int) -> str:
        """Begin, and return the first observation as text."""

    def prompt(self, first: str) -> str:
        """The prompt of an episode that begins with that observation."""
        return "\n\n".join(part for part in (self.instructions, first) if part)

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        given = row["extra"].get("seed", seed)
        if type(given) is not int or given < 0:
            raise NoAnswer(f"the row's `seed` is {given!r}: write a whole number from 0 on")
        first = self.begin(given % LARGEST_SEED)
        if self.in_prompt and first not in row["prompt"]:
            raise NoAnswer(
                f"it begins with {first!r} for the seed {given}, and the prompt does not say so: "
                "write the prompts with `python -m stages.environments.write_prompts`, or set "
                "`in_prompt = False` where the policy need not know"
            )


def plain_text(value: Any) -> str:
    """An observation as text: as it is, or as JSON."""
    return value if isinstance(value, str) else json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # NumPy's
        return value.tolist()
    raise NoAnswer(f"its observation has a {type(value).__name__}: say in `show` how to write it")
