"""Axes: from data to pixels, with ticks at round numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stages.reporting.vocabulary import Form, signed


@dataclass(frozen=True)
class Tick:
    value: float
    label: str


@dataclass(frozen=True)
class Axis:
    """A range and its ticks."""

    low: float
    high: float
    ticks: tuple[Tick, ...]
    title: str = ""

    def place(self, value: float, start: float, end: float) -> float:
        """Where a value lies between two pixels."""
        return start + (value - self.low) / (self.high - self.low) * (end - start)


def fit(
    values: Sequence[float],
    form: Form = Form.NUMBER,
    floor: float | None = None,
    title: str = "",
) -> Axis:
    """An axis around the values, widened to round numbers; `floor` is always on it."""
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    if floor is not None:
        low = min(low, floor)
    if high - low < 1e-9:
        high = low + (abs(low) or 1.0) * 0.5
    step = _round_step((high - low) / 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(
        Tick(index * step, _tick_label(index * step, step, form))
        for index in range(first, last + 1)
    )
    return Axis(first * step, last * step, ticks, title)


def _round_step(raw: float) -> float:
    power: float = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if raw <= factor * power * 1.0001)


def _tick_label(value: float, step: float, form: Form) -> str:
    if form is Form.SHARE:
        value, step = 100 * value, 100 * step
    decimals = next((d for d in range(8) if abs(round(step, d) - step) < step * 1e-6), 8)
    text = f"{value:.{decimals}f}"
    text = text.removeprefix("-") if float(text) == 0 else text
    return signed(text + "%" if form is Form.SHARE else text)
