"""What the notifier remembers: notified.json beside an entry, notify_wanted.json of the clone.

A message consists of items: one end of a stage, or warnings of several kinds. Each way gets each
item once, which is noted as soon as the way has taken it. Only the process that holds the
notifier's lock writes these files.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from pipelines.base.repository import Repository
from pipelines.ledger import files
from pipelines.ledger.entry import Entry


@dataclass(frozen=True)
class Delivery:
    """One item on its way."""

    found: float
    """When the notifier first found that somebody is to get it."""
    ways: tuple[str, ...] = ()
    """Those that have had it, or have refused it."""


@dataclass(frozen=True)
class Notified:
    """notified.json: what was told about an entry."""

    VERSION: ClassVar[int] = 1

    told: tuple[str, ...] = ()
    """The items that were told or given up, or had happened before anybody wanted to know."""
    under_way: dict[str, Delivery] = field(default_factory=dict)
    problem: str | None = None
    """Why the last message was given up."""

    @classmethod
    def of(cls, entry: Entry) -> "Notified":
        return files.read(cls, entry.folder / "notified.json") or cls()

    def save(self, entry: Entry) -> None:
        if entry.folder.is_dir():  # the clone may be gone: do not bring it back
            files.write(entry.folder / "notified.json", self)

    def with_found(self, items: Iterable[str]) -> "Notified":
        now = time.time()
        new = {item: Delivery(now) for item in items if item not in self.under_way}
        return replace(self, under_way={**self.under_way, **new}) if new else self

    def has_had(self, way: str, item: str) -> bool:
        return item in self.under_way and way in self.under_way[item].ways

    def with_way(self, way: str, items: Iterable[str]) -> "Notified":
        passed = {
            item: replace(self.under_way[item], ways=(*self.under_way[item].ways, way))
            for item in items
        }
        return replace(self, under_way={**self.under_way, **passed})

    def with_told(self, items: Iterable[str]) -> "Notified":
        done = tuple(items)
        left = {item: it for item, it in self.under_way.items() if item not in done}
        return replace(self, told=(*self.told, *done), under_way=left)


@dataclass(frozen=True)
class Wanted:
    """notify_wanted.json: of what the profiles wanted somebody to be told at the last look.

    What ended before it was wanted is not told: a line that is added to a profile sends nothing of
    last week.
    """

    VERSION: ClassVar[int] = 1

    events: tuple[str, ...] = ()
    """Each as `PROFILE EVENT`."""

    @classmethod
    def of(cls, repository: Repository) -> "Wanted":
        return files.read(cls, _path_of_wanted(repository)) or cls()

    def save(self, repository: Repository) -> None:
        if repository.home.is_dir():
            files.write(_path_of_wanted(repository), self)


def forget_wanted(repository: Repository) -> None:
    """Where nobody wants to be told any more, so that nothing of meanwhile is told later."""
    _path_of_wanted(repository).unlink(missing_ok=True)


def _path_of_wanted(repository: Repository) -> Path:
    return repository.home / "notify_wanted.json"
