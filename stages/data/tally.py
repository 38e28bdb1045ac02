"""Counts of rows read, kept and dropped, by source and reason."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from stages.contracts.sources import Role


class Dropped(StrEnum):
    """Why a row was dropped."""

    UNREADABLE = "unreadable"
    """It is not what its format says (`prepare.bad_rows`)."""
    DUPLICATE = "duplicate"
    """The role has it already (`prepare.duplicates`)."""
    CONTAMINATED = "contaminated"
    """Its prompt is in a held-out source (`prepare.contamination`)."""
    HELD_OUT = "held_out"
    """Its prompt was split off to be held out (`prepare.held_out`)."""
    TOO_LONG = "too_long"
    """It does not fit the context (`prepare.too_long`)."""
    NOT_DRAWN = "not_drawn"
    """Its source's weight is below 1, and the seed left it out."""


@dataclass
class RowCounts:
    """The rows of one file, or one dataset, in one role."""

    role: Role
    source: str
    format: str = ""
    num_read: int = 0
    num_kept: int = 0
    num_written: int = 0
    """Rows kept, each as often as its source's weight says."""
    dropped: Counter[Dropped] = field(default_factory=Counter)


class Tally:
    """The counts of all roles."""

    def __init__(self) -> None:
        self._counts: dict[tuple[Role, str], RowCounts] = {}

    def of(self, role: Role, source: str) -> RowCounts:
        return self._counts.setdefault((role, source), RowCounts(role, source))

    def all(self) -> Iterator[RowCounts]:
        """By role, then in the order in which they were read."""
        for role in Role:
            yield from (counts for counts in self._counts.values() if counts.role is role)

    def num_written(self, role: Role) -> int:
        return sum(counts.num_written for counts in self.all() if counts.role is role)

    def metrics(self) -> dict[str, int]:
        """`num_dropped`, and what it is made of, by role and reason."""
        by_reason: Counter[str] = Counter()
        for counts in self.all():
            for why, number in counts.dropped.items():
                by_reason[f"num_dropped_{counts.role}_{why}"] += number
        total = sum(by_reason.values())
        return {"num_dropped": total, **{name: by_reason[name] for name in sorted(by_reason)}}

    def table(self) -> list[Mapping[str, Any]]:
        """One line for each file in each role."""
        return [
            {
                "role": counts.role.value,
                "source": counts.source,
                "format": counts.format,
                "read": counts.num_read,
                "kept": counts.num_kept,
                "written": counts.num_written,
                "dropped": {
                    why.value: counts.dropped[why] for why in Dropped if counts.dropped[why]
                },
            }
            for counts in self.all()
        ]


def shown(table: list[Mapping[str, Any]]) -> str:
    """The table for a log."""
    head = ("role", "source", "format", "read", "kept", "written", "dropped")
    lines = [head]
    for row in table:
        why = ", ".join(f"{number} {reason}" for reason, number in row["dropped"].items())
        lines.append((*(str(row[name]) for name in head[:-1]), why or "none"))  # type: ignore[arg-type]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head) - 1)]
    return "\n".join("  ".join([*map(str.ljust, line[:-1], widths), line[-1]]) for line in lines)
