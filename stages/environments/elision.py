"""What the policy reads of an episode that has grown too long: its oldest observations elided.

A context is the prompt and what of the episode the policy reads before its next turn. As long as it
fits, it is all that was said and observed. Where it would not, with the turn that comes next, the
oldest observations are replaced by a marker, and a new *segment* begins: from there on the policy
samples from the shortened context, which grows again. Always true:
- What the policy said itself, and the newest observation, stay.
- What is elided once is never read again, so contexts of one segment have a common beginning.
- Ids are replaced by ids: nothing is tokenised twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from stages.contracts.episodes import EpisodeParams


@dataclass(frozen=True)
class Observed:
    """An observation: its place in the ids of its episode, and what is read if it is elided."""

    start: int
    stop: int
    instead: Sequence[int]

    @property
    def saved(self) -> int:
        """Tokens that eliding it saves; where it is as short as the marker, it stays."""
        return max(0, self.stop - self.start - len(self.instead))


@dataclass
class History:
    """The observations of an episode, and where contexts became shorter."""

    observations: list[Observed] = field(default_factory=list)
    num_elided: int = 0
    """So many of the oldest are elided, but for those that are as short as the marker."""
    starts: list[int] = field(default_factory=list)
    """Where in the episode's ids each segment begins, but for the first."""
    histories: list[list[int]] = field(default_factory=list)
    """What the policy reads there, after the prompt."""

    @property
    def segment(self) -> tuple[int, Sequence[int]]:
        """Where the newest segment begins, and what the policy reads there, after the prompt."""
        return (self.starts[-1], self.histories[-1]) if self.starts else (0, ())

    @property
    def num_unread(self) -> int:
        return sum(each.saved > 0 for each in self.observations[: self.num_elided])

    def read(self, ids: Sequence[int]) -> list[int]:
        """What the policy reads of an episode's ids."""
        kept: list[int] = []
        at = 0
        for each in self.observations[: self.num_elided]:
            if each.saved:
                kept += [*ids[at : each.start], *each.instead]
                at = each.stop
        return [*kept, *ids[at:]]

    def saved(self, num_elided: int | None = None) -> int:
        """Tokens by which a context is shorter where so many of the oldest, or all, are elided."""
        return sum(each.saved for each in self.observations[:num_elided])

    def shorten(self, ids: Sequence[int], num_whole: int, params: EpisodeParams) -> None:
        """Begin a new segment at the end of the ids, where their context does not fit.

        `num_whole` tokens has the whole context: prompt, ids, and the longest turn that may follow.
        """
        if params.context_tokens is None:
            return
        if num_whole - self.saved(self.num_elided) <= params.context_tokens:
            return
        target = int(params.elide_to * params.context_tokens)
        newest = len(self.observations) - 1
        fitting = (n for n in range(newest) if num_whole - self.saved(n) <= target)
        num_elided = next(fitting, newest)
        if self.saved(num_elided) > self.saved(self.num_elided):
            self.num_elided = num_elided
            self.starts.append(len(ids))
            self.histories.append(self.read(ids))
