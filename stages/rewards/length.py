"""length: a reward for responses near a target length.

1 at the target, 0 from a distance of `width` on. With `side: longer` responses up to the target all
get 1, and with `side: shorter` those from the target on.
"""

import math
from collections.abc import Callable
from pathlib import Path

from stages.contracts.reward_rules import Length, LengthShape, LengthSide, LengthUnit
from stages.rewards.given import Row


def open_rule(params: Length, _folder: Path) -> Callable[[Row], float]:
    width = params.width or params.target

    def reward(row: Row) -> float:
        excess = length_of(row, params.unit) - params.target
        if params.side is LengthSide.LONGER:
            excess = max(excess, 0)
        elif params.side is LengthSide.SHORTER:
            excess = min(excess, 0)
        distance = min(abs(excess) / width, 1.0)
        if params.shape is LengthShape.COSINE:
            return (1 + math.cos(math.pi * distance)) / 2
        return 1.0 - distance

    return reward


def length_of(row: Row, unit: LengthUnit) -> int:
    """How long the response is; of an episode in tokens, what the policy said in all its turns."""
    if unit is LengthUnit.TOKENS:
        return int(row["num_tokens"])
    text: str = row["response"]
    return len(text.split()) if unit is LengthUnit.WORDS else len(text)
