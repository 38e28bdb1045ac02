"""A turn of the policy as its text, which knows the ids that it is the text of.

Environments read text. An agent that keeps ids asks for them (chat_agent.py): what the policy had
read, what it then sampled, and how likely that was.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sampled:
    """What a turn was sampled as. The lists are the episode's, and only grow."""

    prompt_ids: Sequence[int]
    """Of the row's prompt."""
    ids: Sequence[int]
    """Of the episode after it: turns and observations."""
    logprobs: Sequence[float]
    start: int
    end: int
    """The turn's place among them."""
    segment_start: int = 0
    """From here on the policy read the ids as they are (elision.py)."""
    history: Sequence[int] = ()
    """What it read in place of those before."""

    @property
    def context(self) -> list[int]:
        """All that the policy had read."""
        return [*self.prompt_ids, *self.history, *self.ids[self.segment_start : self.start]]

    @property
    def whole(self) -> list[int]:
        """All that was said and observed up to the end of the turn, elided or not."""
        return [*self.prompt_ids, *self.ids[: self.end]]

    @property
    def turn(self) -> list[int]:
        return list(self.ids[self.start : self.end])

    @property
    def turn_logprobs(self) -> list[float]:
        return list(self.logprobs[self.start : self.end])


class Spoken(str):
    """The text."""

    sampled: Sampled

    @classmethod
    def of(cls, text: str, sampled: Sampled) -> "Spoken":
        spoken = cls(text)
        spoken.sampled = sampled
        return spoken


def as_json(action: str) -> dict[str, object]:
    """For another process."""
    if not isinstance(action, Spoken):
        return {"step": action}
    said = action.sampled
    lists = [said.prompt_ids, said.ids[: said.end], said.logprobs[: said.end]]
    sampled = [*map(list, lists), said.start, said.end, said.segment_start, list(said.history)]
    return {"step": str(action), "sampled": sampled}


def from_json(message: Mapping[str, object]) -> str:
    action, sampled = str(message["step"]), message.get("sampled")
    return Spoken.of(action, Sampled(*sampled)) if isinstance(sampled, list) else action
