"""How far MLflow has caught up with the ledger. Nothing here imports mlflow.

The ledger is the truth and MLflow is a view of it. A cursor beside each entry, and one for each
invocation under `.lockstep/tracking`, says which run shows it and what of it that run has. Only the
process that holds the shipper's lock writes them. A cursor may lag behind MLflow, after a kill, and
never runs ahead of it; so what it says is missing is sent again, in a form that does no harm twice.
"""

import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import ClassVar, Self

from pipelines.base import atomic
from pipelines.base.repository import Repository
from pipelines.ledger import files
from pipelines.ledger.entry import Entry, Ledger
from pipelines.ledger.invocation import Invocation
from pipelines.ledger.record import Origin
from pipelines.ledger.state import State

URI_VARIABLE = "MLFLOW_TRACKING_URI"
_RESTORED, _ENDED = ".restored", ".ended"
START_GRACE_S = 20.0
"""How long an entry may be without a submission and without a driver before it is given up."""


@dataclass
class Cursor:
    """What both kinds of cursor have: the run that shows it."""

    path: Path
    store: str = ""
    """Where the run is, as `store_address` spells it."""
    experiment_id: str | None = None
    run_id: str | None = None
    url: str | None = None
    done: bool = False
    """Whether nothing is left to send, as things stand."""
    problem: str | None = None
    """Why MLflow refused it; it is not sent again before it changes."""

    @property
    def run(self) -> str:
        """The id of the run, which was made before."""
        assert self.run_id is not None
        return self.run_id

    @classmethod
    def read(cls, path: Path, store: str | None = None) -> Self:
        """The cursor as it was left; a fresh one where there is none, or one for another store."""
        values = atomic.read_json(path) or {}
        if store is not None and values.get("store") != store:
            values = {"store": store}
        known = {item.name for item in fields(cls)} - {"path"}
        return cls(path=path, **{key: value for key, value in values.items() if key in known})

    def save(self) -> None:
        if not self.path.parent.is_dir():
            raise FileNotFoundError(self.path.parent)  # the clone is gone: do not bring it back
        values = asdict(self)
        del values["path"]
        atomic.write_json(self.path, values)


@dataclass
class StageCursor(Cursor):
    """How far an entry is shipped."""

    described: bool = False
    step: int | None = None
    """The last step whose metrics are there."""
    tables: dict[str, int] = field(default_factory=dict)
    """The time stamp of each table that is there."""
    logs: int = 0
    """How many attempts' logs are there."""
    state: str | None = None
    attempts: int = 0

    @classmethod
    def of(cls, entry: Entry, store: str | None = None) -> Self:
        return cls.read(entry.folder / "tracking.json", store)

    def shows(self, entry: Entry, state: State) -> bool:
        """Whether MLflow has all there is of an entry in this state."""
        attempts = len(entry.attempts())
        return self.done and self.state == state and self.attempts == attempts and not state.alive


@dataclass
class ParentCursor(Cursor):
    """How far an invocation is shipped."""

    iterations: dict[str, str] = field(default_factory=dict)
    """The run of each iteration."""
    statuses: dict[str, str] = field(default_factory=dict)
    """The status of each of its runs, as last sent."""
    measured: list[str] = field(default_factory=list)
    """The entries whose summary it has."""
    params: list[str] = field(default_factory=list)
    entries: dict[str, str] = field(default_factory=dict)
    """The state of each entry when it was closed."""
    registered: bool = False
    """Whether its last policies were put into the model registry, or that was tried."""
    final: bool = False
    """Whether the command behind it has ended for sure: what comes later belongs to another."""

    @classmethod
    def of(cls, repository: Repository, identity: str, store: str | None = None) -> Self:
        return cls.read(_file(repository, identity, ".json"), store)


@dataclass(frozen=True)
class Restored:
    """INVOCATION.restored: the stages that a command had DVC restore, which have no entry."""

    VERSION: ClassVar[int] = 1

    origin: Origin
    stages: tuple[str, ...]
    time: float


@dataclass(frozen=True)
class Group:
    """One invocation, with what is left to do about it."""

    id: str
    command: str
    entries: list[Entry]
    waiting: list[Entry]
    """Ended, and not wholly in MLflow."""
    alive: list[Entry]
    over: bool
    """Whether the command behind it has ended."""
    over_for_sure: bool
    closed: bool
    """Whether its own runs say so."""
    restored: Restored | None

    @property
    def origin(self) -> Origin:
        """Who asked, and from what."""
        if self.entries:
            return self.entries[0].origin
        assert self.restored is not None
        return self.restored.origin

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.alive or not self.closed)


class Scanner:
    """Looks through the ledger again and again, without reading twice what can no longer change."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._settled: dict[Path, Invocation] = {}

    def groups(self) -> list[Group]:
        """Every invocation of this clone, oldest first."""
        members: dict[str, list[Entry]] = {}
        commands: dict[str, Invocation] = {}
        waiting: set[Path] = set()
        alive: set[Path] = set()
        for entry in Ledger(self._repository.jobs).entries():
            invocation = self._settled.get(entry.folder)
            if invocation is None:
                try:
                    invocation, state = invocation_of(entry), entry.state()
                except FileNotFoundError:
                    continue  # the entry was removed while we looked at it
                if state is State.NEW:
                    if entry.has_driver() or is_young(entry):
                        alive.add(entry.folder)
                    else:
                        continue
                elif state.alive:
                    alive.add(entry.folder)
                elif not StageCursor.of(entry).shows(entry, state):
                    waiting.add(entry.folder)
                elif state is State.PUBLISHED:
                    self._settled[entry.folder] = invocation
            members.setdefault(invocation.id, []).append(entry)
            commands[invocation.id] = invocation
        for path in sorted(_parents(self._repository).glob(f"*{_RESTORED}")):
            restored = files.read(Restored, path)
            if restored is None:
                continue
            invocation = restored.origin.invocation
            members.setdefault(invocation.id, [])
            commands.setdefault(invocation.id, invocation)
        return [
            self._group(
                commands[identity],
                entries,
                [entry for entry in entries if entry.folder in waiting],
                [entry for entry in entries if entry.folder in alive],
            )
            for identity, entries in members.items()
        ]

    def _group(
        self,
        invocation: Invocation,
        entries: list[Entry],
        waiting: list[Entry],
        alive: list[Entry],
    ) -> Group:
        cursor = ParentCursor.of(self._repository, invocation.id)
        over, sure = cursor.final, cursor.final
        if not over:
            lives = command_lives(self._repository, invocation)
            over, sure = not (alive or lives), lives is False and not alive
        closed = cursor.done and (cursor.final or (over and cursor.entries == states_of(entries)))
        return Group(
            id=invocation.id,
            command=invocation.command,
            entries=entries,
            waiting=waiting,
            alive=alive,
            over=over,
            over_for_sure=sure,
            closed=closed,
            restored=files.read(Restored, _file(self._repository, invocation.id, _RESTORED)),
        )


def runs_page(repository: Repository) -> str:
    """The place within MLflow's pages that lists the newest invocation's runs; else its first."""
    noted = []
    for path in _parents(repository).glob("*.json"):
        with suppress(FileNotFoundError):
            noted.append((path.stat().st_mtime, path))
    for _, path in sorted(noted, reverse=True):
        experiment = ParentCursor.read(path).experiment_id
        if experiment:
            return f"/#/experiments/{experiment}/runs?workflowType=machine_learning"
    return ""


def left_behind(
    repository: Repository, groups: Iterable[Group], store: str
) -> Iterator[ParentCursor]:
    """Invocations that have runs which are open, and no entry any more: others took them over."""
    with_entries = {_as_file_name(group.id) for group in groups}
    for path in sorted(_parents(repository).glob("*.json")):
        if path.stem not in with_entries:
            cursor = ParentCursor.read(path, store)
            if not cursor.final and "RUNNING" in cursor.statuses.values():
                yield cursor


def is_young(entry: Entry) -> bool:
    """Whether it was made just now; not one from before the clock was set back."""
    with suppress(FileNotFoundError):  # removed meanwhile
        return 0 <= time.time() - entry.origin.created < START_GRACE_S
    return False


def invocation_of(entry: Entry) -> Invocation:
    """The command that an entry belongs to: the one behind its latest attempt."""
    attempts = entry.attempts()
    launch = attempts[-1].launch if attempts else None
    return (launch and launch.invocation) or entry.origin.invocation


def states_of(entries: Iterable[Entry]) -> dict[str, str]:
    return {entry_name(entry): entry.state().value for entry in entries}


def entry_name(entry: Entry) -> str:
    return f"{entry.stage}/{entry.folder.name}"


def entry_identity(entry: Entry) -> str:
    """The name of an entry, also among those of other clones and of removed ledgers."""
    return f"{entry_name(entry)}/{entry.origin.created:.6f}"


def unshipped(repository: Repository) -> list[Entry]:
    """The entries that ended and are not wholly in MLflow."""
    return [entry for group in Scanner(repository).groups() for entry in group.waiting]


def end_invocation(repository: Repository, identity: str) -> None:
    """Say that the command with this id has done all it will, though its process may still live."""
    atomic.write_json(_file(repository, identity, _ENDED), {"time": time.time()})


def note_restored(repository: Repository, origin: Origin, stages: list[str]) -> None:
    """Keep which stages a command had DVC restore: nothing else in the ledger tells of them."""
    path = _file(repository, origin.invocation.id, _RESTORED)
    files.write(path, Restored(origin, tuple(stages), time.time()))


def tracking_uri(repository: Repository) -> str:
    """Where MLflow is: MLFLOW_TRACKING_URI, or SQLite in this clone. May hold credentials."""
    return os.environ.get(URI_VARIABLE) or f"sqlite:///{database(repository)}"


def database(repository: Repository) -> Path:
    return repository.shared_home / "mlflow.db"


def store_address(repository: Repository) -> str:
    """The tracking URI without what could be a credential."""
    scheme, separator, rest = tracking_uri(repository).partition("://")
    host, slash, path = rest.partition("?")[0].partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"


def command_lives(repository: Repository, invocation: Invocation) -> bool | None:
    """Whether the command still runs; None where only its jobs can tell."""
    if _file(repository, invocation.id, _ENDED).exists():
        return False
    return None if invocation.pid is None else invocation.lives()


def _parents(repository: Repository) -> Path:
    return repository.home / "tracking"


def _file(repository: Repository, identity: str, ending: str) -> Path:
    return _parents(repository) / f"{_as_file_name(identity)}{ending}"


def _as_file_name(identity: str) -> str:
    return re.sub(r"[^\w.-]", "_", identity)
