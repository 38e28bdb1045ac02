"""Learning-rate schedules: a factor on the peak, from (step, number of steps)."""

import math
from collections.abc import Callable

from stages.contracts.optimizer import Schedule


def warmup_then_cosine(warmup_ratio: float, floor: float = 0.1) -> Callable[[int, int], float]:
    """Linear warm-up, then cosine decay to `floor`."""

    def factor(step: int, num_steps: int) -> float:
        warmup = math.ceil(warmup_ratio * num_steps)
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, num_steps - warmup)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))

    return factor


def scheduled(
    schedule: Schedule, *, steps_before: int, warmup: int, decay: int, floor: float
) -> Callable[[int, int], float]:
    """A linear rise over the first `warmup` steps of all iterations, then what the schedule says.

    `steps_before` steps are done already. A decay reaches `floor` after `decay` steps of all.
    """

    def factor(step: int, num_steps: int) -> float:  # noqa: ARG001
        step += steps_before
        if step < warmup:
            return (step + 1) / warmup
        if schedule is Schedule.CONSTANT:
            return 1.0
        done = min(1.0, (step - warmup) / (decay - warmup))
        left = 1 - done if schedule is Schedule.LINEAR else 0.5 * (1 + math.cos(math.pi * done))
        return floor + (1 - floor) * left

    return factor
