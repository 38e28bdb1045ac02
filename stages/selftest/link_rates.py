"""What the ranks of a job measured of their nodes together; the measuring is in links.py."""

from dataclasses import dataclass
from typing import Any

INSIDE = "inside nodes"
"""The words for where a rank is while those of its node exchange something."""


@dataclass(frozen=True)
class Links:
    """What all ranks know in the end."""

    inside: dict[str, float]
    """GB/s among the ranks of each node that has several."""
    between: dict[tuple[str, str], float]
    """GB/s between one rank of each of two neighbouring nodes."""
    wrong: tuple[str, ...]
    """Nodes, or pairs of them, that got wrong numbers."""
    clocks: dict[str, float]
    """Seconds that each node's clock is ahead of the median."""

    def as_json(self) -> dict[str, Any]:
        between = {" and ".join(pair): rate for pair, rate in self.between.items()}
        return {"inside": self.inside, "between": between, "clocks": self.clocks}
