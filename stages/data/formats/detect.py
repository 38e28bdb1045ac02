"""Detects the format of a source from its columns.

Of the formats whose columns are all there, the most specific count: `prompt`, `completion` and
`label` are rated responses, not prompts. Of those, the ones that can serve the role count. One has
to be left; else the source is refused, and the columns and ways out are named.
"""

from collections.abc import Mapping
from typing import Any

from stages.contracts.sources import FormatName, Role, Source
from stages.data.formats.rows import listed
from stages.data.formats.table import FORMATS, RowFormat
from stages.data.row_error import RowError


def renamed(row: Mapping[str, Any], columns: Mapping[str, str | None]) -> Mapping[str, Any]:
    """A row with its columns under the names that `columns` gives them."""
    if not columns:
        return row
    left = {name: value for name, value in row.items() if name not in columns}
    for theirs, ours in columns.items():
        if theirs not in row or ours is None:
            continue
        if ours in left:
            raise RowError(f"`columns` calls {theirs!r} {ours!r}, and there is a column {ours!r}")
        left[ours] = row[theirs]
    return left


def detect(columns: frozenset[str], role: Role, source: Source) -> RowFormat:
    """The format of rows with these columns; RowError where it cannot be told."""
    chosen = source.take == "chosen"
    if source.format is not FormatName.AUTO:
        format = FORMATS[source.format]
        if not format.serves(role, chosen=chosen):
            raise RowError(f"format {format.name} gives no {role}{_hint(format, role)}")
        return format
    own = {format.name: format.own(columns) for format in FORMATS.values()}
    specific = [
        format
        for format in FORMATS.values()
        if own[format.name] and not any(own[format.name] < other for other in own.values())
    ]
    if not specific:
        raise RowError(
            f"the columns {listed(sorted(columns))} are of no known format. For {role}, rename "
            f"them in `columns` to those of one: {_known(role)}"
        )
    able = [format for format in specific if format.serves(role, chosen=chosen)]
    if not able:
        names = " and ".join(format.name for format in specific)
        raise RowError(
            f"the columns {listed(sorted(columns))} are those of {names}, which gives no "
            f"{role}{_hint(specific[0], role)}. {role} come from: {_known(role)}"
        )
    if len(able) > 1:
        names = " or ".join(format.name for format in able)
        raise RowError(
            f"the columns {listed(sorted(columns))} may be {names}: say which with `format`, or "
            "leave columns out with `columns: {name: null}`"
        )
    return able[0]


def _known(role: Role) -> str:
    formats = [format for format in FORMATS.values() if format.serves(role)]
    return "; ".join(f"{format.name} ({_columns(format)})" for format in formats)


def _columns(format: RowFormat) -> str:
    either = [" or ".join(format.one_of)] if format.one_of else []
    return ", ".join([*format.needs, *either])


def _hint(format: RowFormat, role: Role) -> str:
    if role is Role.DEMONSTRATIONS and "pairs" in format.gives:
        return " (`take: chosen` demonstrates the better response)"
    if role is Role.DEMONSTRATIONS and "rating" in format.gives:
        return (
            " (not every rated response is to be imitated; to take them all, leave the rating "
            "out with `columns`)"
        )
    return ""
