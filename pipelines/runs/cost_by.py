"""What costs are listed by, and the calendar: days, weeks and months of this machine's clock."""

import re
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta
from enum import StrEnum

from pipelines.base.errors import LockstepError

_UNITS = {"h": 1, "d": 24, "w": 7 * 24}


class By(StrEnum):
    """What a line of the table is about."""

    STAGE = "stage"
    ITERATION = "iteration"
    ATTEMPT = "attempt"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"
    PROFILE = "profile"
    PIPELINE = "pipeline"
    EXPERIMENT = "experiment"


def since_when(text: str | None, now: float) -> float:
    """The time that `7d`, `12h`, `2w` ago or a date stands for; without one, the beginning."""
    if text is None:
        return 0.0
    if match := re.fullmatch(r"(\d+)([hdw])", text.strip()):
        return now - int(match[1]) * _UNITS[match[2]] * 3600.0
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except ValueError:
        raise LockstepError(
            f"--since {text!r} is no time: write 12h, 7d or 2w, or a date such as 2026-03-31"
        ) from None


def periods(by: By, begin: float, end: float) -> Iterator[tuple[str, float, float]]:
    """The days, weeks or months between two times, by the clock of this machine."""
    day = PERIODS[by](date.fromtimestamp(begin))
    while (first := _midnight(day)) < end:
        following = PERIODS[by](day + timedelta(days=_LONGER_THAN[by]))
        yield _name(by, day), first, _midnight(following)
        day = following


PERIODS: dict[By, Callable[[date], date]] = {
    By.DAY: lambda day: day,
    By.WEEK: lambda day: day - timedelta(days=day.weekday()),
    By.MONTH: lambda day: day.replace(day=1),
}
"""The first day of the period that a day is in."""
_LONGER_THAN = {By.DAY: 1, By.WEEK: 7, By.MONTH: 31}
"""Days from its first one to some day of the next period."""


def _midnight(day: date) -> float:
    return datetime(day.year, day.month, day.day).timestamp()


def _name(by: By, day: date) -> str:
    if by is By.MONTH:
        return f"{day:%Y-%m}"
    return f"week of {day}" if by is By.WEEK else str(day)
