"""A stage's context that remembers when each step ended.

A step ends when its metrics are logged: all that a step includes is in it, and the GPU has been
waited for, since the metrics came from there.
"""

import time
from collections.abc import Mapping
from itertools import pairwise

from stages.context import Context


class StepClock(Context):
    """Where a run begins, with step 1, it begins anew."""

    times: list[float]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, metrics)
        if step == 1:
            self.times = []
        self.times.append(time.monotonic())

    def seconds(self, skipped: int) -> list[float]:
        """Of each step after the first ones."""
        times = self.times[skipped - 1 :]
        return [after - before for before, after in pairwise(times)]
