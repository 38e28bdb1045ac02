"""The notifier: a background process of a clone that tells somebody how stages fare.

Jobs and drivers send nothing and wait for nothing: they start this process, which reads the ledger.
`notified.json` beside an entry says what was told about it by which way, and is written after each
message that was taken; so each is sent once, by whatever command the stage runs, and twice only if
the process is killed just between. What cannot be delivered is tried for an hour, then left, and
said in `lockstep status`. Where no profile has `notify`, nothing of this is imported or started.
"""

import hashlib
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from pipelines.base.background import Background, run_in_background
from pipelines.base.errors import LockstepError
from pipelines.base.redact import redact
from pipelines.base.repository import Repository
from pipelines.config.notify import NotifyOn, set_variables
from pipelines.slurm.scheduler import Scheduler
from pipelines.tracking.cursor import StageCursor
from pipelines.tracking.errors import RefusedError, UnreachableError
from pipelines.tracking.notified import Notified, Wanted, forget_wanted
from pipelines.tracking.notify_due import Due, Scan, may_wish, wishes

LATEST_S = 3600.0
"""How long after it was found that something is to be told it is tried again."""


class Notifier:
    """Sends the messages that a ledger's entries owe. Its owner holds the notifier's lock."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._process = notifier_process(repository)
        self._scan = Scan(repository)
        self._due: list[Due] = []
        self._damaged: str | None = None
        self.jobs_alive = False
        """Whether a job runs, or a failure may still be retried."""

    def is_busy(self) -> bool:
        Scheduler(self._repository).refresh()
        owing = list(self._scan.owing())
        noted = [due for each in owing if (due := _noted(each)) is not None]
        self._due = [due for due in noted if not due.waits()]
        self.jobs_alive = self._scan.jobs_alive or len(noted) > len(self._due)
        self._note_wanted()
        if self._scan.damaged != self._damaged:
            self._damaged = self._scan.damaged
            self._process.note_problem(self._damaged)
        return bool(self._due or self.jobs_alive)

    def _note_wanted(self) -> None:
        """After a look, which has settled what had happened before it was wanted."""
        profiles = self._scan.profiles.items()
        wanted = Wanted(tuple(f"{name} {on}" for name, notify in profiles for on in notify.on))
        if wanted != Wanted.of(self._repository):
            wanted.save(self._repository)

    def connect(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing is kept open."""

    def send(self) -> bool:
        problems = [problem for due in self._due for problem in self._tell(due)]
        if self._due:
            text = f"a notification failed ({problems[0]})" if problems else self._scan.damaged
            self._process.note_problem(text)
        return not problems

    def _tell(self, due: Due) -> list[str]:
        """By each way what it has not had; what went wrong."""
        from pipelines.tracking.notify_send import ways_of

        problems: list[str] = []
        notified, missed = Notified.of(due.entry).with_found(due.items), ""
        for name, way in ways_of(due.notify).items():
            items = {k: v for k, v in due.items.items() if not notified.has_had(name, k)}
            if not items:
                continue
            try:
                way(self._message(replace(due, items=items)))
            except UnreachableError as error:
                missed = f"{name}: {redact(str(error))}"
                problems.append(missed)
                continue
            except RefusedError as error:
                refusal = f"{name}: {redact(str(error))}"
                problems.append(refusal)
                print(f"{due.entry.stage}: {due.on}: {refusal}", flush=True)
                notified = replace(notified, problem=refusal)
            notified = notified.with_way(name, items)
            notified.save(due.entry)
        earliest = time.time() - LATEST_S
        late = [item for item in due.items if notified.under_way[item].found < earliest]
        if missed and late:
            notified = replace(notified, problem=missed)
        if done := late if missed else list(due.items):
            notified.with_told(done).save(due.entry)
        return problems

    def _message(self, due: Due) -> dict[str, Any]:
        entry, attempt = due.entry, due.entry.attempts()[-1]
        result, worker, cursor = attempt.result, attempt.worker, StageCursor.of(entry)
        error = redact((result and result.error) or "") or None
        if error is not None:  # a lone surrogate cannot be sent
            error = error.encode("utf-8", "backslashreplace").decode()
        sentences = list(due.items.values()) if due.on is NotifyOn.WARNING else []
        what = {
            NotifyOn.FAILED: f"failed: {(error or 'its job is gone').splitlines()[0]}",
            NotifyOn.WARNING: f"warning: {'; '.join(sentences)}",
            NotifyOn.ENDED: "done",
        }[due.on]
        return {
            "text": f"{entry.stage} {what} ({self._repository.root.name})",
            "event": due.on.value,
            "stage": entry.stage,
            "state": entry.state().value,
            "error": error,
            "warnings": sentences,
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


def _noted(due: Due) -> Due | None:
    """The message with the moment when it was found; None if it had happened before."""
    if due.is_old:
        Notified.of(due.entry).with_told(due.items).save(due.entry)
        return None
    before = Notified.of(due.entry)
    notified = before.with_found(due.items)
    if notified != before:
        notified.save(due.entry)
    return replace(due, notified=notified)


def is_configured(repository: Repository) -> bool:
    """Whether any profile may have `notify`: asked by every driver, so without reading YAML.

    The word may stand in a comment: the notifier, which reads the profiles, ends at once then.
    """
    return any(may_wish(repository))


def start_notifier(repository: Repository) -> None:
    """Make sure that messages are sent, if any are wanted; returns at once, never fails."""
    # A full disk: the stage fails on that too, with a better error.
    with suppress(OSError):
        if is_configured(repository):
            notifier_process(repository).start()
        else:
            forget_wanted(repository)


def wait_until_told(repository: Repository, deadline: float | None) -> None:
    """Wait for the messages of a clone that is about to be deleted; not past the deadline."""
    if is_configured(repository):
        scan, process = Scan(repository), notifier_process(repository)
        process.wait(lambda: any(scan.owing()), deadline, process.problem())


def problem(repository: Repository) -> str | None:
    """Why the last message was not delivered, for the user."""
    noted = notifier_process(repository).problem()
    if noted is None or not is_configured(repository):
        return None
    return f"{noted['text']}; stages are not affected (log: {repository.home / 'notify.log'})"


def notifier_process(repository: Repository) -> Background:
    """One for each state of the profiles, and of what they name being set: a command with another
    state takes over."""
    files = sorted((repository.root / "slurm_profiles").glob("*.yaml"))
    texts = [path.read_bytes() for path in files if path.is_file()]
    address = hashlib.sha256(repr((texts, set_variables(texts))).encode()).hexdigest()
    return Background(repository, "notify", "pipelines.tracking.notify", address)


def run_notifier(repository: Repository, lock_timeout: float) -> None:
    process = notifier_process(repository)
    if not wishes(repository):
        return
    try:
        process.serve(partial(Notifier, repository), lock_timeout)
    except LockstepError as error:
        process.note_problem(str(error))
        raise


if __name__ == "__main__":
    run_in_background(run_notifier, sys.argv[1:])
