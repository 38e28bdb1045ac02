"""What somebody is to be told of: read off the ledger, the profiles and what was told before.

Looking changes nothing; what comes of a look is noted by the notifier.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.config.notify import Notify, NotifyOn
from pipelines.config.profiles import load_profile
from pipelines.ledger.entry import Attempt, Entry, Ledger
from pipelines.ledger.retries import is_retryable
from pipelines.ledger.state import State
from pipelines.tracking.cursor import command_lives, invocation_of, is_young
from pipelines.tracking.health import Health
from pipelines.tracking.notified import Notified, Wanted

RETRY_WAIT_S = 60.0
"""How long a failure that may be retried is not told, while the command behind it lives: longer
than a flow takes to retry it, with its pause, Prefect's scheduling and the start of dvc."""
JUST_BEFORE_S = 60.0
"""A stage that ended this shortly before its end was wanted counts: its own driver asked."""
SILENT_S = 3600.0
"""The same of a job that died, of which only the last sign of life is known."""
_ENDS = {
    State.COMPLETED: NotifyOn.ENDED,
    State.PUBLISHED: NotifyOn.ENDED,
    State.FAILED: NotifyOn.FAILED,
    State.DIED: NotifyOn.FAILED,
}


@dataclass(frozen=True)
class Due:
    """One message that somebody is to get."""

    entry: Entry
    notify: Notify
    on: NotifyOn
    items: dict[str, str]
    """What it consists of; of each warning, its sentence."""
    notified: Notified
    is_old: bool
    """Whether it happened before anybody wanted to be told of such."""
    may_be_retried: bool
    """Whether it is a failure that a flow of Prefect's may be about to try again."""

    def waits(self) -> bool:
        """Whether it is not told yet, because it may be mended."""
        return self.may_be_retried and 0 <= time.time() - self._found < RETRY_WAIT_S

    @property
    def when(self) -> float:
        """When it ended; where that is not known, when it was found."""
        result = self.entry.attempts()[-1].result
        ended = result.ended if result is not None else None
        return self._found if self.on is NotifyOn.WARNING or ended is None else ended

    @property
    def _found(self) -> float:
        return min(self.notified.under_way[item].found for item in self.items)


class Scan:
    """Looks through the ledger again and again, without reading twice what can no longer change."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._ledger = Ledger(repository.jobs)
        self._health = Health(repository.root)
        self._settled: set[Path] = set()
        self.jobs_alive = False
        """Whether a job runs, or is about to."""
        self.profiles: dict[str, Notify] = {}
        """What each said at the last look."""
        self.damaged: str | None = None
        """Why an entry cannot be read; the others are."""

    def owing(self) -> Iterator[Due]:
        """What is to be told, the oldest first."""
        self.jobs_alive, self.damaged = False, None
        self.profiles = wishes(self._repository)
        wanted = Wanted.of(self._repository).events
        latest = {entry.folder for entry in self._ledger.latest().values()}
        for entry in self._ledger.entries():
            if entry.folder in self._settled:
                continue
            try:
                yield from self._due(entry, wanted, entry.folder in latest)
            except FileNotFoundError:
                continue  # the entry was removed while we looked at it
            except LockstepError as error:
                self.damaged = str(error)

    def _due(self, entry: Entry, wanted: tuple[str, ...], is_latest: bool) -> Iterator[Due]:
        state, attempts = entry.state(), entry.attempts()
        at_work = state.alive or entry.has_driver() or (state is State.NEW and is_young(entry))
        self.jobs_alive = self.jobs_alive or at_work
        profile = attempts[-1].launched.profile if attempts else ""
        notify = self.profiles.get(profile)
        if notify is None:
            return
        notified = Notified.of(entry)

        def due(on: NotifyOn, items: dict[str, str]) -> Due:
            is_new = f"{profile} {on}" not in wanted and not notified.under_way.keys() & items
            is_old = is_new and not state.alive and not _ended_just_now(attempts[-1])
            retried = on is NotifyOn.FAILED and self._may_be_retried(entry)
            return Due(entry, notify, on, items, notified, is_old, retried)

        new: dict[str, str] = {}
        if is_latest and NotifyOn.WARNING in notify.on:
            found = self._health.of(entry.stage, entry, now=not state.alive)
            items = {f"warning {symptom.kind.value}": symptom.sentence for symptom in found}
            new = {item: items[item] for item in items if item not in notified.told}
            if new:
                yield due(NotifyOn.WARNING, new)
        end = _ENDS.get(state)
        if end is None or (end is NotifyOn.FAILED and entry.has_driver()):
            return
        item = f"{end} {len(attempts)}"
        if end in notify.on and item not in notified.told:
            yield due(end, {item: ""})
        elif state is State.PUBLISHED and not at_work and not new:
            self._settled.add(entry.folder)

    def _may_be_retried(self, entry: Entry) -> bool:
        """Not in the folder of an experiment, which DVC deletes after a failure."""
        if self._repository.shared_home != self._repository.home:
            return False
        lives = command_lives(self._repository, invocation_of(entry))
        return lives is not False and is_retryable(entry.attempts()[-1])


def may_wish(repository: Repository) -> Iterator[Path]:
    """The profiles that name `notify`, if only in a comment: found without reading YAML."""
    for path in sorted((repository.root / "slurm_profiles").glob("*.yaml")):
        with suppress(OSError):
            if b"notify" in path.read_bytes():
                yield path


def wishes(repository: Repository) -> dict[str, Notify]:
    """What each profile says now; of one that cannot be read, nothing."""
    found = {}
    for path in may_wish(repository):
        with suppress(LockstepError):
            if (notify := load_profile(repository.root, path.stem).notify) is not None:
                found[path.stem] = notify
    return found


def _ended_just_now(attempt: Attempt) -> bool:
    result = attempt.result
    if result is not None and result.ended is not None:
        return time.time() - result.ended < JUST_BEFORE_S
    return time.time() - _last_sign(attempt) < SILENT_S


def _last_sign(attempt: Attempt) -> float:
    """When a job that reported no result was last heard of."""
    worker = attempt.worker
    signs = [attempt.launched.time, worker.time if worker else 0.0]
    for path in (*attempt.logs(), attempt.entry.folder / "metrics.jsonl"):
        with suppress(FileNotFoundError):
            signs.append(path.stat().st_mtime)
    return max(signs)
