"""Numbers and lists as the comments of a profile say them."""

from collections.abc import Iterable

SHOWN = 6


def names(items: Iterable[str]) -> str:
    """Each once, in their order, and not too many."""
    unique = list(dict.fromkeys(items))
    more = len(unique) - SHOWN
    return ", ".join(unique[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def span(minutes: int | None) -> str:
    """90 is 90 min, 240 is 4 h, 2880 is 2 days."""
    if minutes is None:
        return "none"
    for unit, length in (("days", 1440), ("h", 60)):
        if minutes % length == 0 and minutes >= 2 * length:
            return f"{minutes // length} {unit}"
    return "1 h" if minutes == 60 else "1 day" if minutes == 1440 else f"{minutes} min"


def size(megabytes: int) -> str:
    """As --mem takes it: rounded down to gigabytes, but for small amounts."""
    return f"{megabytes // 1024}G" if megabytes >= 8192 else f"{megabytes}M"
