"""The notifier: a background process of a clone that tells somebody how stages fare.

Jobs and drivers send nothing and wait for nothing: they start this process, which reads the ledger.
`notified.json` beside an entry says what was told about it, and is written after a message was
taken; so each message is sent once, by whatever command the stage runs, and twice only if the
process is killed just between. What cannot be delivered is tried for an hour, then left, and said
in `lockstep status`. Where no profile has `notify`, nothing of this is imported or started.
"""

import hashlib
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pipelines.base import atomic
from pipelines.base.background import Background, run_in_background
from pipelines.base.errors import LockstepError
from pipelines.base.redact import redact
from pipelines.base.repository import Repository
from pipelines.config.notify import Notify, NotifyOn, set_variables
from pipelines.config.profiles import load_profile
from pipelines.ledger.entry import Attempt, Entry, Ledger
from pipelines.ledger.state import State
from pipelines.slurm.scheduler import Scheduler
from pipelines.tracking.cursor import StageCursor, is_young
from pipelines.tracking.errors import RefusedError, UnreachableError
from pipelines.tracking.health import Health

LATEST_S = 3600.0
"""How long after it happened something is still told."""
RETRY_WAIT_S = 15.0
"""How long a failure that may be retried is not told: longer than a flow waits to retry it."""
JUST_BEFORE_S = 60.0
"""A stage that ended this shortly before the first look counts: its own driver started it."""
_ENDS = {
    State.COMPLETED: NotifyOn.ENDED,
    State.PUBLISHED: NotifyOn.ENDED,
    State.FAILED: NotifyOn.FAILED,
    State.DIED: NotifyOn.FAILED,
}


@dataclass
class Notified:
    """notified.json: what was told about an entry, or given up."""

    ended: dict[str, int] = field(default_factory=dict)
    """The ends that were told, with the number of attempts there were then."""
    warnings: list[str] = field(default_factory=list)
    """The kinds of warnings."""
    delivered: list[str] = field(default_factory=list)
    """The ways that have had the message which others have not had yet."""
    problem: str | None = None
    """Why the last message was given up."""

    @classmethod
    def of(cls, entry: Entry) -> "Notified":
        return cls(**(atomic.read_json(entry.folder / "notified.json") or {}))

    def save(self, entry: Entry) -> None:
        if entry.folder.is_dir():  # the clone may be gone: do not bring it back
            atomic.write_json(entry.folder / "notified.json", asdict(self))


@dataclass(frozen=True)
class Due:
    """One message that somebody is to get."""

    entry: Entry
    notify: Notify
    on: NotifyOn
    kinds: tuple[str, ...] = ()
    sentences: tuple[str, ...] = ()
    when: float = 0.0


class Notifier:
    """Sends the messages that a ledger's entries owe. Its owner holds the notifier's lock."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._process = notifier_process(repository)
        self._ledger = Ledger(repository.jobs)
        self._health = Health(repository.root)
        self._settled: set[Path] = set()
        self._due: list[Due] = []
        self.jobs_alive = False

    def is_busy(self) -> bool:
        Scheduler(self._repository).refresh()
        self._due = list(self.owing())
        return bool(self._due or self.jobs_alive)

    def connect(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing is kept open."""

    def send(self) -> bool:
        from pipelines.tracking.notify_send import ways_of

        problems = []
        for due in self._due:
            notified, message = Notified.of(due.entry), self._message(due)
            unreachable = None
            for name, way in ways_of(due.notify).items():
                if name in notified.delivered:
                    continue
                try:
                    way(message)
                except UnreachableError as error:
                    unreachable = f"{name}: {error}"
                    problems.append(unreachable)
                    continue
                except RefusedError as error:
                    notified.problem = f"{name}: {redact(str(error))}"
                    problems.append(notified.problem)
                    print(f"{due.entry.stage}: {due.on}: {notified.problem}", flush=True)
                notified.delivered.append(name)
            late = time.time() - due.when > LATEST_S
            if unreachable is None or late:
                _settle(due, notified)
                notified.delivered = []
                notified.problem = unreachable if late and unreachable else notified.problem
            notified.save(due.entry)
        if self._due:
            self._process.note_problem(
                f"a notification failed ({problems[0]})" if problems else None
            )
        return not problems

    def owing(self) -> Iterator[Due]:
        """What is to be told, the oldest first."""
        self.jobs_alive = False
        profiles: dict[str, Notify | None] = {}
        since = _since(self._repository)
        latest = {entry.folder for entry in self._ledger.latest().values()}
        for entry in self._ledger.entries():
            if entry.folder in self._settled:
                continue
            state, attempts = entry.state(), entry.attempts()
            at_work = state.alive or entry.has_driver() or (state is State.NEW and is_young(entry))
            self.jobs_alive = self.jobs_alive or at_work
            profile = attempts[-1].launched.profile if attempts else None
            if profile is not None and profile not in profiles:
                profiles[profile] = _notify_of(self._repository, profile)
            notify = profiles[profile] if profile is not None else None
            if notify is None:
                continue
            notified, when = Notified.of(entry), _when(entry)
            if entry.folder in latest and NotifyOn.WARNING in notify.on:
                found = self._health.of(entry.stage, entry, now=not state.alive)
                new = [s for s in found if s.kind.value not in notified.warnings]
                if new and when >= since:
                    kinds = tuple(symptom.kind.value for symptom in new)
                    sentences = tuple(symptom.sentence for symptom in new)
                    yield Due(entry, notify, NotifyOn.WARNING, kinds, sentences, when)
                    continue
            end = _ENDS.get(state)
            if end is None or (end is NotifyOn.FAILED and entry.has_driver()):
                continue
            if end is NotifyOn.FAILED and _may_be_retried(attempts[-1]):
                self.jobs_alive = True
                continue
            told = notified.ended.get(end) == len(attempts)
            if end in notify.on and not told and when >= since:
                yield Due(entry, notify, end, when=when)
            elif state is State.PUBLISHED and not at_work:
                self._settled.add(entry.folder)

    def _message(self, due: Due) -> dict[str, Any]:
        entry, attempt = due.entry, due.entry.attempts()[-1]
        result, worker, cursor = attempt.result, attempt.worker, StageCursor.of(entry)
        error = redact((result and result.error) or "") or None
        what = {
            NotifyOn.FAILED: f"failed: {(error or 'its job is gone').splitlines()[0]}",
            NotifyOn.WARNING: f"warning: {'; '.join(due.sentences)}",
            NotifyOn.ENDED: "done",
        }[due.on]
        return {
            "text": f"{entry.stage} {what} ({self._repository.root.name})",
            "event": due.on.value,
            "stage": entry.stage,
            "state": entry.state().value,
            "error": error,
            "warnings": list(due.sentences),
            "attempts": len(entry.attempts()),
            "profile": attempt.launched.profile,
            "job": attempt.launched.job,
            "host": worker.host if worker else None,
            "commit": entry.origin.git_commit,
            "experiment": entry.origin.experiment,
            "mlflow_url": cursor.url,
            "clone": str(self._repository.root),
            "log": str(attempt.folder),
            "time": due.when,
        }


def _settle(due: Due, notified: Notified) -> None:
    if due.on is NotifyOn.WARNING:
        notified.warnings += due.kinds
    else:
        notified.ended[due.on.value] = len(due.entry.attempts())


def _may_be_retried(attempt: Attempt) -> bool:
    """Whether a flow of Prefect's may be about to try it again, after a pause."""
    result = attempt.result
    waited = time.time() - (result.ended or 0.0) if result is not None else RETRY_WAIT_S
    return result is not None and result.retryable and 0 <= waited < RETRY_WAIT_S


def _when(entry: Entry) -> float:
    """When it ended, or was last heard of."""
    attempt = entry.attempts()[-1]
    result, worker = attempt.result, attempt.worker
    known = (result and result.ended) or (worker and worker.time) or attempt.launched.time
    return known or entry.asked_for


def _notify_of(repository: Repository, profile: str) -> Notify | None:
    """What a profile says now; nothing where it cannot be read."""
    try:
        return load_profile(repository.root, profile).notify
    except LockstepError:
        return None


def is_configured(repository: Repository) -> bool:
    """Whether any profile has `notify`: asked by every driver, so without reading YAML."""
    for path in (repository.root / "slurm_profiles").glob("*.yaml"):
        try:
            if b"\nnotify:" in b"\n" + path.read_bytes():
                return True
        except OSError:
            continue
    return False


def start_notifier(repository: Repository) -> None:
    """Make sure that messages are sent, if any are wanted; returns at once, never fails."""
    if is_configured(repository):
        try:
            _since(repository)
            notifier_process(repository).start()
        except OSError:
            return  # a full disk: the stage fails on that too, with a better error


def wait_until_told(repository: Repository, deadline: float | None) -> None:
    """Wait for the messages of a clone that is about to be deleted; not past the deadline."""
    if is_configured(repository):
        notifier, process = Notifier(repository), notifier_process(repository)
        process.wait(lambda: any(notifier.owing()), deadline, process.problem())


def problem(repository: Repository) -> str | None:
    """Why the last message was not delivered, for the user."""
    noted = notifier_process(repository).problem()
    if noted is None or not is_configured(repository):
        return None
    return f"{noted['text']}; stages are not affected (log: {repository.home / 'notify.log'})"


def _since(repository: Repository) -> float:
    """What ended before anybody wanted to be told is not told."""
    path = repository.home / "notify_since.json"
    known = atomic.read_json(path)
    if known is None:
        repository.home.mkdir(exist_ok=True)
        known = {"time": time.time() - JUST_BEFORE_S}
        atomic.write_json(path, known)
    return float(known["time"])


def notifier_process(repository: Repository) -> Background:
    """One for each state of the profiles, and of what they name being set: a command with another
    state takes over."""
    files = sorted((repository.root / "slurm_profiles").glob("*.yaml"))
    texts = [path.read_bytes() for path in files if path.is_file()]
    address = hashlib.sha256(repr((texts, set_variables(texts))).encode()).hexdigest()
    return Background(repository, "notify", "pipelines.tracking.notify", address)


def run_notifier(repository: Repository, lock_timeout: float) -> None:
    notifier_process(repository).serve(partial(Notifier, repository), lock_timeout)


if __name__ == "__main__":
    run_in_background(run_notifier, sys.argv[1:])
