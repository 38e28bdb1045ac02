"""The rows that `prepare` left out, each with the reason: its selection, done once more.

`prepare` records how many rows it dropped and why, not which. This reads the files of
`prepare.folder` again through the very functions that `prepare` selects with, and takes for granted
what it wrote: a row that was selected and is in no output did not fit the context, or the chat
template refused it. Counts that differ from the recorded ones mean that the files or the params
were changed since, and are said.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.base.errors import LockstepError
from pipelines.config.params import load_params
from pipelines.lineage.content import NEEDS_PYARROW
from pipelines.ui.data_report import REPORT, DataReport, read_report
from pipelines.ui.data_rows import open_role, path_of
from stages.contracts.params import Params
from stages.contracts.sources import Role

if TYPE_CHECKING:
    from stages.data.items import Example, Place

MOST_READ = 200_000
"""Rows of all roles: what selects them again reads each file several times."""
MOST_TEXT = 2000
"""Characters of a row that are shown."""


@dataclass(frozen=True)
class DroppedRow:
    role: Role
    source: str
    line: int
    counted: str
    """What `line` counts: lines or rows."""
    reason: str
    text: str


@dataclass(frozen=True)
class DroppedRows:
    rows: tuple[DroppedRow, ...] = field(default=())
    notes: tuple[str, ...] = field(default=())
    """Where what was found is not what `prepare` recorded."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def dropped_rows(root: Path) -> DroppedRows:
    """Every row that was left out; LockstepError where that cannot be told here."""
    report = read_report(root)
    if not any(row["dropped"] for row in report.sources):
        return DroppedRows()
    params = load_params(root)
    if params.prepare.source == "arithmetic":
        raise LockstepError("params.yaml names no files now: prepare.source is arithmetic")
    num_read = sum(row["read"] for row in report.sources)
    if num_read > MOST_READ:
        raise LockstepError(
            f"prepare read {num_read:,} rows: only up to {MOST_READ:,} are selected again to show "
            "which were dropped; the counts above are complete"
        )
    if hubs := [s.label for of in params.prepare.files.values() for s in of if s.dataset]:
        raise LockstepError(
            f"rows of a hub's dataset are not read again here ({', '.join(hubs)}): the counts "
            "above are complete"
        )
    return _replay_once(root, _signature(root, params))


@lru_cache(maxsize=2)
def _replay_once(root: Path, signature: object) -> DroppedRows:  # noqa: ARG001
    return _replay(root, load_params(root))


def _signature(root: Path, params: Params) -> tuple[object, ...]:
    """Of all that is read."""
    files = [path for path in (root / params.prepare.folder).rglob("*") if path.is_file()]
    files += [path for role in Role if (path := path_of(root, role)).is_file()]
    files.append(root / REPORT)
    states = [(path, path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(files)]
    return (params.model_dump_json(), *states)


def _replay(root: Path, params: Params) -> DroppedRows:
    try:
        from stages.context import StageError
        from stages.data.selection import FilesCorpus
        from stages.data.sources import sources_of
        from stages.data.tally import Dropped
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        raise LockstepError(NEEDS_PYARROW) from None
    found = _Found(read_report(root))

    class Watched(FilesCorpus):
        """Notes which row is left out, where `prepare` only counts."""

        def _unused(self, role: Role, item: "Example", *rest: Any, **named: Any) -> Dropped | None:
            why = super()._unused(role, item, *rest, **named)
            found.selected(role, item, why.value if why else None)
            return why

    folder = root / params.prepare.folder
    try:
        corpus = Watched(params.prepare, folder, params.seed)
        for role in Role:
            if path_of(root, role).is_file():
                written = _written(root, role)
                for item in corpus.rows(role):
                    if item.row_id not in written:
                        found.not_written(role, item)
        for role, sources in sources_of(params.prepare, folder).items():
            for opened in sources:
                if "unreadable" in found.recorded(role, opened.label):
                    places = ((opened.place(number), row) for number, row in opened.rows())
                    found.unread(role, places)
    except StageError as error:
        raise LockstepError(f"the rows cannot be selected again: {error}") from None
    return found.result()


def _written(root: Path, role: Role) -> set[str]:
    with open_role(root, role) as file:
        return set(file.read(columns=["row_id"])["row_id"].to_pylist())


class _Found:
    """What is known of the rows so far."""

    def __init__(self, report: DataReport) -> None:
        self._recorded = {(row["role"], row["source"]): row["dropped"] for row in report.sources}
        self._rows: list[DroppedRow] = []
        self._unwritten: list[tuple[Role, Place, str]] = []
        self._seen: set[tuple[Role, str, int]] = set()

    def recorded(self, role: Role, source: str) -> Mapping[str, int]:
        counts: Mapping[str, int] = self._recorded.get((role.value, source), {})
        return counts

    def selected(self, role: Role, item: "Example", why: str | None) -> None:
        self._seen.add((role, item.place.source, item.place.line))
        if why is not None:
            self._note(role, item.place, why, _text_of(item))

    def not_written(self, role: Role, item: "Example") -> None:
        """One that was selected: it is too long, or the template refuses it."""
        self._unwritten.append((role, item.place, _text_of(item)))

    def unread(self, role: Role, places: Iterable[tuple["Place", object]]) -> None:
        for place, row in places:
            if (role, place.source, place.line) not in self._seen:
                self._note(role, place, "unreadable", str(row))

    def result(self) -> DroppedRows:
        unread = Counter((row.role, row.source) for row in self._rows if row.reason == "unreadable")
        for role, place, text in self._unwritten:
            recorded = self.recorded(role, place.source)
            refused = recorded.get("unreadable", 0) - unread[role, place.source]
            known = ["too_long"] if "too_long" in recorded else []
            known += ["unreadable"] if refused > 0 else []
            self._note(role, place, " or ".join(known) or "not written", text)
        order = {role: index for index, role in enumerate(Role)}
        rows = sorted(self._rows, key=lambda row: (order[row.role], row.source, row.line))
        return DroppedRows(tuple(rows), tuple(self._differences()))

    def _note(self, role: Role, place: "Place", why: str, text: str) -> None:
        row = DroppedRow(role, place.source, place.line, place.counted, why, text[:MOST_TEXT])
        self._rows.append(row)

    def _differences(self) -> Iterator[str]:
        here = Counter((row.role.value, row.source) for row in self._rows)
        for key in sorted(self._recorded.keys() | here.keys()):
            recorded = sum(self._recorded.get(key, {}).values())
            if recorded != here[key]:
                yield (
                    f"{key[0]} of {key[1]}: prepare recorded {recorded} dropped rows, and the "
                    f"files and params.yaml of now give {here[key]}: they were changed since"
                )


def _text_of(item: "Example") -> str:
    return "\n\n".join(
        [item.prompt.text if item.prompt.messages else "", *_responses(item)]
    ).strip()


def _responses(item: "Example") -> Iterator[str]:
    from stages.data.dialogue import response_text

    for messages in item.responses():
        yield response_text(messages)
