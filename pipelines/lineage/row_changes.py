"""Which training rows differ between two stage runs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.lineage.rows import COLUMNS, Row, Rows, order

_COMPARED = tuple(column for column in COLUMNS if column not in ("policy_hash", "source"))
"""What training used: neither another policy with the same responses nor another line in the
source file makes a row different."""


@dataclass(frozen=True)
class RowChange:
    """A row that differs between two stage runs, or that only one has."""

    prompt_id: str
    step: int | None
    sample_index: int | None
    role: str | None
    old: Row | None
    new: Row | None
    fields: tuple[str, ...]
    """What differs, where both have it."""


def compare_rows(old: Rows, new: Rows) -> list[RowChange]:
    """The rows that are not the same on both sides, in order."""
    sides = [_numbered(rows.rows) for rows in (old, new)]
    changes = []
    for key in sorted({*sides[0], *sides[1]}):
        one, other = sides[0].get(key), sides[1].get(key)
        differing = tuple(c for c in _COMPARED if one and other and one[c] != other[c])
        if one is None or other is None or differing:
            row = one or other or {}
            place = (row["prompt_id"], row["step"], row["sample_index"], row["role"])
            changes.append(RowChange(*place, one, other, differing))
    return changes


def _numbered(rows: Sequence[Row]) -> dict[tuple[Any, ...], Row]:
    """By prompt, step, sample and role; the data may have a prompt several times."""
    numbers: Counter[tuple[Any, ...]] = Counter()
    numbered = {}
    for row in rows:
        place = order(row)
        numbered[*place, numbers[place]] = row
        numbers[place] += 1
    return numbered


def changes_json(changes: Sequence[RowChange], limit: int | None) -> dict[str, Any]:
    return {
        "only_in_old": sum(change.new is None for change in changes),
        "only_in_new": sum(change.old is None for change in changes),
        "changed": sum(bool(change.fields) for change in changes),
        "rows": [{**vars(change), "fields": list(change.fields)} for change in changes[:limit]],
    }
