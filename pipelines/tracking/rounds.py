"""Bringing MLflow up to date with the ledger, one round at a time, and waiting until it is.

A round goes through the invocations with something left to do, the oldest first, and through their
entries. What MLflow refuses is noted and left; when MLflow is out of reach the round ends and the
next one begins where it broke off.
"""

import os
import time
import traceback
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from pipelines.base.repository import Repository
from pipelines.ledger.entry import Entry
from pipelines.ledger.state import State
from pipelines.tracking import notify, openlineage
from pipelines.tracking.cursor import (
    Group,
    ParentCursor,
    Scanner,
    StageCursor,
    end_invocation,
    unshipped,
)
from pipelines.tracking.errors import (
    ArtifactsUnreachableError,
    MissingError,
    RefusedError,
    UnreachableError,
)
from pipelines.tracking.openlineage_events import Scan
from pipelines.tracking.parents import ParentShipper
from pipelines.tracking.shipper import is_switched_off, shipper_process, start_shipper
from pipelines.tracking.stage import StageShipper

if TYPE_CHECKING:
    from pipelines.tracking.store import Store

SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    # A server that is down is found out in seconds; the rounds themselves are the retries.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "GIT_PYTHON_REFRESH": "quiet",
}
Register = Callable[["Store", Repository], object]
"""Puts the policies of a pipeline that has ended into the model registry."""


class Tracker:
    """Ships a clone's ledger. Its owner holds the shipper's lock."""

    def __init__(self, repository: Repository, register: Register) -> None:
        self.repository = repository
        self.jobs_alive = False
        self._register_policies = register
        self._process = shipper_process(repository)
        self._scanner = Scanner(repository)

    def is_busy(self) -> bool:
        return any(group.busy for group in self._scanner.groups())

    def connect(self) -> bool:
        os.environ.update(SETTINGS)
        try:
            import pipelines.tracking.store  # noqa: F401  (takes seconds)
        except ImportError as error:
            remedy = "install the extra `control`"
            self._process.note_problem(f"MLflow cannot be imported here ({error}): {remedy}")
            return False
        return True

    def send(self) -> bool:
        return self.sync() is None

    def close(self) -> None:
        """Leave nothing RUNNING if the clone is gone, or another MLflow takes over."""
        if self._process.is_wanted() or "_store" not in vars(self):
            return
        try:
            self._store.abandon()
        except (UnreachableError, RefusedError) as error:
            print(f"runs left open: {error}", flush=True)

    def sync(self) -> str | None:
        """One round; returns what went wrong, which is also noted for the commands to print."""
        all_groups = self._scanner.groups()
        groups = [group for group in all_groups if group.busy]
        self.jobs_alive = any(group.alive for group in groups)
        problems: list[str] = []
        try:
            for group in groups:
                problems += self._sync_group(group)
            self._parents.close_left_behind(all_groups)
        except UnreachableError as error:
            problems.append(f"MLflow at {self._process.address} does not answer ({error})")
        text = problems[0] if problems else None
        before = (self._process.problem() or {}).get("text")
        if text is not None and text != before:
            print(time.strftime("%F %T"), *problems, sep="\n  ", flush=True)
        if text is not None or before is not None:
            self._process.note_problem(text)
        return text

    @cached_property
    def _store(self) -> "Store":
        from pipelines.tracking.store import Store

        return Store(self.repository)

    @cached_property
    def _stages(self) -> StageShipper:
        return StageShipper(self.repository, self._store)

    @cached_property
    def _parents(self) -> ParentShipper:
        return ParentShipper(self.repository, self._store)

    def _sync_group(self, group: Group) -> list[str]:
        problems: list[str] = []
        try:
            cursor = self._parents.ensure(group)
            for entry in [*group.waiting, *group.alive]:
                try:
                    self._sync_entry(group, entry, cursor)
                except ArtifactsUnreachableError as error:
                    problems.append(f"MLflow's artifact store does not answer ({error})")
                except FileNotFoundError:
                    continue  # the entry was removed while we looked at it
            if not problems:
                self._register(group, cursor)
                self._parents.update(group, cursor)
        except FileNotFoundError:
            pass  # the ledger was removed while we looked at it
        except MissingError:
            ParentCursor(cursor.path, cursor.store).save()
        except RefusedError as error:
            problems.append(f"MLflow refused the run of `{group.command}`: {error}")
            cursor.done, cursor.final, cursor.problem = True, True, str(error)
            cursor.save()
        return problems

    def _register(self, group: Group, cursor: ParentCursor) -> None:
        """Have the last policies of a pipeline that has come to its end in the model registry."""
        ended = (State.COMPLETED, State.PUBLISHED)
        reported = any(e.stage == "report" and e.state() in ended for e in group.entries)
        if not (group.over and reported) or cursor.final or cursor.registered:
            return
        self._register_policies(self._store, self.repository)
        cursor.registered = True
        cursor.save()

    def _sync_entry(self, group: Group, entry: Entry, parent: ParentCursor) -> None:
        state = entry.state()
        if state is State.NEW:
            return
        try:
            self._stages.ship(entry, state, self._parents.above(group, entry, parent))
            return
        except MissingError:
            StageCursor(entry.folder / "tracking.json", parent.store).save()
            return
        except (UnreachableError, FileNotFoundError):
            raise
        except RefusedError as error:
            reason = str(error)
        except Exception as error:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"
        print(f"{entry.stage}: left out: {reason}", flush=True)
        cursor = StageCursor.of(entry, parent.store)
        cursor.state, cursor.attempts = state.value, len(entry.attempts())
        cursor.done, cursor.problem = True, reason
        cursor.save()


def ship_all(
    repository: Repository, timeout: float | None = None, ended: str | None = None
) -> list[Entry]:
    """Have everything shipped now, and wait for it; returns what MLflow could not have.

    Without a timeout, for as long as a shipper is at work and nothing is known to be in its way.
    `ended` is the id of the caller's own invocation, whose runs are closed though it still lives.
    """
    if ended is not None:
        end_invocation(repository, ended)
    deadline = None if timeout is None else time.monotonic() + timeout
    shipper, emitter = shipper_process(repository), openlineage.emitter_process(repository)
    before, emitter_before = shipper.problem(), emitter.problem()
    start_shipper(repository)
    if openlineage.is_configured(repository):
        scan = Scan(repository)
        emitter.wait(lambda: any(scan.owing()), deadline, emitter_before)
    if repository.shared_home != repository.home:
        notify.wait_until_told(repository, deadline)
    if is_switched_off():
        return []
    scanner = Scanner(repository)
    shipper.wait(
        lambda: any(g.waiting or (g.over and not g.closed) for g in scanner.groups()),
        deadline,
        before,
    )
    return unshipped(repository)
