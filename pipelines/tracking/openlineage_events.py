"""The OpenLineage events that the ledger's entries still owe."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pipelines.base import atomic
from pipelines.base.repository import Repository
from pipelines.ledger.entry import Entry, Ledger
from pipelines.ledger.state import State
from pipelines.tracking.cursor import is_young

START, RUNNING, COMPLETE, FAIL, ABORT = "START", "RUNNING", "COMPLETE", "FAIL", "ABORT"
_FINAL_EVENT = {
    State.COMPLETED: COMPLETE,
    State.PUBLISHED: COMPLETE,
    State.FAILED: FAIL,
    State.DIED: FAIL,
    State.CANCELLED: ABORT,
}


@dataclass(frozen=True)
class LastEvent:
    """What was sent last about an entry."""

    event: str | None = None
    attempts: int = 0
    """How many there were then."""
    problem: str | None = None
    """Why the endpoint refused it; it is not sent again."""

    @classmethod
    def of(cls, entry: Entry) -> "LastEvent":
        return cls(**(atomic.read_json(entry.folder / "openlineage.json") or {}))

    def save(self, entry: Entry) -> None:
        if entry.folder.is_dir():  # the clone may be gone: do not bring it back
            atomic.write_json(entry.folder / "openlineage.json", asdict(self))


def due(entry: Entry, last: LastEvent) -> list[str]:
    """The events that an entry owes, in order.

    A failure counts once nobody is there to try again: a job that Slurm has ended may be followed
    by another, in the same run. An entry that goes on after it had ended says so with RUNNING.
    """
    state, attempts = entry.state(), len(entry.attempts())
    if last.event == COMPLETE or state in (State.NEW, State.QUEUED):
        return []
    owed = []
    if last.event is None:
        owed.append(START)
    elif last.event in (FAIL, ABORT) and attempts > last.attempts:
        owed.append(RUNNING)
    final = _FINAL_EVENT.get(state)
    again = owed or last.event != final
    if final == COMPLETE and entry.outs:
        return [*owed, COMPLETE]
    if final in (FAIL, ABORT) and again and not entry.has_driver():
        return [*owed, final]
    return owed


class Scan:
    """Looks through the ledger again and again, without reading twice what can no longer change."""

    def __init__(self, repository: Repository) -> None:
        self._ledger = Ledger(repository.jobs)
        self._settled: set[Path] = set()
        self.alive = False
        """Whether a job lives, or is about to."""

    def owing(self) -> Iterator[tuple[Entry, list[str]]]:
        """Entries with events to send, oldest first."""
        self.alive = False
        for entry in self._ledger.entries():
            if entry.folder in self._settled:
                continue
            last, state = LastEvent.of(entry), entry.state()
            if last.event == COMPLETE:
                self._settled.add(entry.folder)
                continue
            new = state is State.NEW and is_young(entry)
            self.alive = self.alive or new or state.alive or entry.has_driver()
            if events := due(entry, last):
                yield entry, events
