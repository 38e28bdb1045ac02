"""The rows that a user's files, or a hub's datasets, give to each role.

Rows are read as they are needed, and more than once where more than one thing is asked of them: no
role is ever in memory as a whole. A role's sources are the ones that params.yaml names, or, where
it names none at all, the files of the folder that are called after the role.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path

from stages.context import StageError
from stages.contracts.prepare import PrepareParams, Unfit
from stages.contracts.sources import Role, Source
from stages.data.artifacts import canonical_json
from stages.data.folder import entries, files_by_role, kind_of, role_of
from stages.data.formats.detect import detect, renamed
from stages.data.formats.files import (
    TYPES,
    Numbered,
    counted_in,
    file_type,
    hub_rows,
    is_text,
    rows_of,
)
from stages.data.formats.rows import listed
from stages.data.formats.table import RowFormat
from stages.data.items import Example, Place, items_of
from stages.data.row_error import RowError
from stages.data.tally import Dropped, RowCounts

NUM_LOOKED_AT = 64
"""Rows whose columns tell a file's format."""


@dataclass(frozen=True)
class Opened:
    """One file of a source, or one dataset."""

    source: Source
    label: str
    """What its rows are said to come from."""
    path: Path | None = None

    def rows(self) -> Iterator[Numbered]:
        return hub_rows(self.source) if self.path is None else rows_of(self.path)

    def place(self, number: int) -> Place:
        return Place(self.label, number, self._counted)

    @cached_property
    def _counted(self) -> str:
        return "row" if self.path is None else counted_in(self.path)


def sources_of(params: PrepareParams, folder: Path) -> dict[Role, list[Opened]]:
    """The sources of each role; StageError where a path names no file, or there is nothing."""
    if params.files:
        by_role = {
            role: [
                one
                for source in params.files.get(role, ())
                for one in _opened(source, role, folder)
            ]
            for role in Role
        }
    else:
        by_role = {
            role: [_named(folder, path) for path in paths]
            for role, paths in files_by_role(folder).items()
        }
        for role, opened in by_role.items():
            if len(opened) > 1:
                names = " and ".join(one.label for one in opened)
                raise StageError(
                    f"{folder}: {names} are both {role}: keep one, or use prepare.files"
                )
    if not by_role[Role.FEEDBACK]:
        by_role[Role.FEEDBACK] = by_role[Role.PREFERENCES]
    return by_role


def unused_files(sources: Mapping[Role, Sequence[Opened]], folder: Path) -> list[str]:
    """What lies in the folder and no role reads, where params.yaml says what is read.

    StageError of a held-out file: other prompts would be held out, and nobody would see it.
    """
    used = {one.path for opened in sources.values() for one in opened if one.path is not None}
    used |= {parent for path in used for parent in path.parents}
    unused = [path for path in entries(folder) if path not in used]
    for path in unused:
        role = role_of(path)
        if role is not None and role.is_held_out and not sources[role]:
            raise StageError(
                f"{path} is read by nothing, because prepare.files names no source of {role}: "
                f"name it in prepare.files.{role}, or move it out of the folder"
            )
    return [path.relative_to(folder).as_posix() for path in unused]


def read(opened: Opened, role: Role, params: PrepareParams, counts: RowCounts) -> Iterator[Example]:
    """The rows that a source gives to a role; what is wrong with one is named by its place."""
    numbered = opened.rows()
    head = list(islice(numbered, NUM_LOOKED_AT))
    if not head:
        raise StageError(f"{_where(opened)} is empty: it needs at least one row for {role}")
    format = _format(opened, role, head)
    counts.format = format.name.value
    not_met = {theirs for theirs, ours in opened.source.columns.items() if ours is not None}
    for number, row in chain(head, numbered):
        counts.num_read += 1
        place = opened.place(number)
        try:
            if isinstance(row, RowError):
                raise row
            not_met -= row.keys()
            given = format.given(renamed(row, opened.source.columns))
            for item in items_of(role, given, place, params.turns, params.ranked_pairs):
                everything = [item.prompt.content, *item.responses(), item.answer, item.extra]
                if not is_text(canonical_json(everything)):
                    raise RowError("it holds half a character")
                yield item
        except RowError as error:
            unreadable(place, error, params, counts)
    if not_met:
        raise StageError(
            f"{_where(opened)}: `columns` renames {listed(sorted(not_met))}, and no row has that: "
            "fix the name, or leave it out"
        )


def unreadable(place: Place, error: object, params: PrepareParams, counts: RowCounts) -> None:
    """Count a row that cannot be used, or refuse it."""
    if params.bad_rows is Unfit.REFUSE:
        raise StageError(f"{place}: {error}. To leave such rows out, set prepare.bad_rows to drop")
    counts.dropped[Dropped.UNREADABLE] += 1


def _format(opened: Opened, role: Role, head: list[Numbered]) -> RowFormat:
    columns: set[str] = set()
    wrong = f"{_where(opened)} has no columns"
    for number, row in head:
        try:
            if isinstance(row, RowError):
                raise row
            named = renamed(row, opened.source.columns)
        except RowError as error:
            wrong = f"{opened.place(number)}: {error}"
            continue
        columns.update(name for name, value in named.items() if value is not None)
    if not columns:
        raise StageError(wrong)
    try:
        return detect(frozenset(columns), role, opened.source)
    except RowError as error:
        raise StageError(f"{_where(opened)}: {error}") from None


def _where(opened: Opened) -> str:
    return opened.label if opened.path is None else str(opened.path)


def _opened(source: Source, role: Role, folder: Path) -> Iterator[Opened]:
    if source.dataset:
        yield Opened(source, source.label)
        return
    paths = _matching(source.path, folder)
    if not paths:
        raise StageError(
            f"prepare.files.{role}: {source.path!r} matches no file in {folder}: fix the path, or "
            "set prepare.folder to where the data are"
        )
    for path in paths:
        if not path.is_file() or file_type(path) is None:
            raise StageError(
                f"prepare.files.{role}: {path} is {kind_of(path)}, which is not read. These types "
                f"are: {TYPES}"
            )
        yield Opened(source, path.relative_to(folder).as_posix(), path)


def _matching(pattern: str, folder: Path) -> list[Path]:
    if (folder / pattern).is_file():  # its name may look like a glob
        return [folder / pattern]
    try:
        return sorted(path for path in folder.glob(pattern) if not path.is_dir())
    except (ValueError, IndexError):  # what is no pattern matches nothing
        return []


def _named(folder: Path, path: Path) -> Opened:
    label = path.relative_to(folder).as_posix()
    return Opened(Source(path=label), label, path)
