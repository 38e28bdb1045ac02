"""Bringing MLflow up to date with the ledger, one round at a time, and waiting until it is.

A round goes through the invocations with something left to do, the oldest first, and through their
entries. What MLflow refuses is noted and left; when MLflow is out of reach the round ends and the
next one begins where it broke off.
"""

import os
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from pipelines.base.background import Patience
from pipelines.base.repository import Repository
from pipelines.ledger.entry import Entry
from pipelines.ledger.state import State
from pipelines.tracking import openlineage
from pipelines.tracking.cursor import (
    Group,
    ParentCursor,
    Scanner,
    StageCursor,
    end_invocation,
    note_problem,
    noted_problem,
    store_address,
    unshipped,
)
from pipelines.tracking.parents import ParentShipper
from pipelines.tracking.shipper import is_shipping, is_switched_off, start_shipper
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
_POLL_S = 0.1

Register = Callable[["Store", Repository], object]
"""Puts the policies of a pipeline that has ended into the model registry."""


class Tracker:
    """Ships a clone's ledger. Its owner holds the shipper's lock."""

    def __init__(self, repository: Repository, register: Register) -> None:
        os.environ.update(SETTINGS)
        import pipelines.tracking.store  # noqa: F401  (takes seconds; fails here if not installed)

        self.repository = repository
        self._register_policies = register
        self.jobs_alive = False
        self._scanner = Scanner(repository)
        self._store: Store | None = None
        self._stages: StageShipper | None = None
        self._parents: ParentShipper | None = None

    def sync(self) -> str | None:
        """One round; returns what went wrong, which is also kept for the commands to say."""
        from pipelines.tracking.store import UnreachableError

        all_groups = self._scanner.groups()
        groups = [group for group in all_groups if group.busy]
        self.jobs_alive = any(group.alive for group in groups)
        problems: list[str] = []
        try:
            self._open()
            assert self._parents is not None
            for group in groups:
                problems += self._sync_group(group)
            self._parents.close_left_behind(all_groups)
        except UnreachableError as error:
            problems.append(f"MLflow at {store_address(self.repository)} does not answer ({error})")
        text = problems[0] if problems else None
        before = (noted_problem(self.repository) or {}).get("text")
        if text is not None and text != before:
            print(time.strftime("%F %T"), *problems, sep="\n  ", flush=True)
        if text is not None or before is not None:
            note_problem(self.repository, text)
        return text

    def abandon(self) -> None:
        """Leave nothing RUNNING here: the ledger went away, or another MLflow takes over."""
        from pipelines.tracking.store import RefusedError, UnreachableError

        try:
            if self._store is not None:
                self._store.abandon()
        except (UnreachableError, RefusedError) as error:
            print(f"runs left open: {error}", flush=True)

    def _open(self) -> None:
        if self._store is None:
            from pipelines.tracking.store import Store

            store = Store(self.repository)
            self._stages = StageShipper(self.repository, store)
            self._parents = ParentShipper(self.repository, store)
            self._store = store

    def _sync_group(self, group: Group) -> list[str]:
        from pipelines.tracking.store import ArtifactsUnreachableError, MissingError, RefusedError

        assert self._parents is not None
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
        assert self._store is not None
        self._register_policies(self._store, self.repository)
        cursor.registered = True
        cursor.save()

    def _sync_entry(self, group: Group, entry: Entry, parent: ParentCursor) -> None:
        from pipelines.tracking.store import MissingError, RefusedError, UnreachableError

        assert self._stages is not None
        assert self._parents is not None
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
    before = noted_problem(repository)
    lineage_before = openlineage.noted_problem(repository)
    start_shipper(repository)
    patience = Patience(lambda: is_shipping(repository), timeout)
    openlineage.wait_until_told(repository, timeout, lineage_before)
    if is_switched_off():
        return []
    scanner = Scanner(repository)
    while patience.lasts():
        noted = noted_problem(repository)
        # One that talks to another MLflow, and is about to make room, may still say its own.
        if noted and noted != before and noted.get("store") == store_address(repository):
            break
        left = any(g.waiting or (g.over and not g.closed) for g in scanner.groups())
        # That nothing is in the way any more, a round says last of all.
        if not left and not (noted and is_shipping(repository)):
            break
        time.sleep(_POLL_S)
    return unshipped(repository)
