"""One watcher of a clone for all pages that are open: it looks, and says what has changed.

The status of every stage takes a second or more, so it is made anew only when a file that it
depends on has another date, when a job's state has changed, or after a while, for what no date
tells. Between these, the rows of jobs at work follow their progress. Nobody looks while no page is
open.
"""

import asyncio
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.dvc_repo.graph import Node, read_graph
from pipelines.runs.exclusive import running_pipeline
from pipelines.runs.status import stage_statuses
from pipelines.slurm.scheduler import Scheduler
from pipelines.tracking.health import Health
from pipelines.tracking.shipper import problem
from pipelines.ui.run_command import Output, output_of
from pipelines.ui.run_rows import LIVE, Row, may_move, moved, row_of, standing

LOOK_S = 1.0
"""Between two looks while a page is open."""
ANEW_S = 30.0
"""After so long the status is made anew in any case; after longer, where making it takes long."""
PATIENCE = 20
"""At most one part in so many of the time is spent on that."""
PING_S = 15.0
"""How often a stream with nothing to say shows that it is there."""


@dataclass(frozen=True)
class Snapshot:
    """What all pages show. A row that has not changed is the very row of the snapshot before."""

    version: str
    rows: Mapping[str, Row]
    problems: tuple[str, ...] = ()
    pipeline: Mapping[str, Any] | None = None
    """The command that runs the pipeline now."""
    output: Output | None = None
    """What the command that a page started last has said."""

    def as_json(self, since: "Snapshot | None" = None) -> dict[str, Any]:
        """All of it, or what is new since an earlier one."""
        known = since.rows if since and since.rows.keys() == self.rows.keys() else None
        rows = self.rows.items()
        new = [row for name, row in rows if known is None or known[name] is not row]
        return {
            "version": self.version,
            "whole": known is None,
            "now": time.time(),
            "stages": new,
            "problems": self.problems,
            "pipeline": self.pipeline,
            "output": self.output.as_json() if self.output else None,
        }


@dataclass(frozen=True)
class Marks:
    """They differ when the status of a stage may."""

    dates: tuple[object, ...]
    """Of the files that it depends on."""
    states: Mapping[str, object]
    """Of the jobs that may change theirs."""


class Watch:
    """What is remembered from look to look; shared by every request."""

    def __init__(self, repository: Repository) -> None:
        self.repository = repository
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None
        self._health = Health(repository.root)
        self._marks: Marks | None = None
        self._may_move: tuple[str, ...] = ()
        self._graph: tuple[tuple[object, ...], dict[str, Node]] = ((), {})
        self._made = self._cost = 0.0
        """When the status was last made, and how long that took."""
        self._name, self._count = secrets.token_hex(4), 0
        """Of the versions: those of another server are others."""
        self._pages = 0
        self._looking: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def current(self) -> Snapshot:
        """As fresh as the pages that are open have it; looks where none is."""
        snapshot = self._snapshot
        return snapshot if snapshot is not None and self._pages else self.look()

    def look(self) -> Snapshot:
        """The snapshot of now; what cannot be read now is told beside what was known before."""
        with self._lock:
            before = self._snapshot or Snapshot("", {})
            try:
                new = self._look(before)
            except Exception as error:
                # Whatever it is, it is shown: a watcher that ended would pass old states for new.
                self._marks = None
                words = str(error) if isinstance(error, LockstepError | OSError) else repr(error)
                new = replace(before, problems=(words,))
            if self._snapshot is None or new != before:
                self._count += 1
                new = replace(new, version=f"{self._name}-{self._count}")
                self._snapshot = new
            return self._snapshot

    def _look(self, before: Snapshot) -> Snapshot:
        marks, age = self._read_marks(before), time.monotonic() - self._made
        if marks != self._marks or age > max(ANEW_S, PATIENCE * self._cost):
            began = time.monotonic()
            new = self._make(before)
            # As they were before: what has changed since is seen at the next look. So is a job
            # that was not known by then.
            states = {name: marks.states.get(name) for name in self._may_move}
            self._marks, self._made = replace(marks, states=states), time.monotonic()
            self._cost = self._made - began
        else:
            rows = before.rows.items()
            new = replace(before, rows={name: moved(row, self._health) for name, row in rows})
        holder = running_pipeline(self.repository)
        shown = holder and {key: holder.get(key) for key in ("command", "time", "pid")}
        return replace(new, pipeline=shown, output=output_of(self.repository))

    def _make(self, before: Snapshot) -> Snapshot:
        nodes = self._nodes()
        rows = {}
        for status in stage_statuses(self.repository):
            old = before.rows.get(status.stage)
            row = row_of(status, nodes.get(status.stage), old)
            rows[status.stage] = old if old is not None and old == row else row
        trouble = problem(self.repository)
        self._may_move = tuple(name for name, row in rows.items() if may_move(row))
        return replace(before, rows=rows, problems=(trouble,) if trouble else ())

    def _nodes(self) -> dict[str, Node]:
        root = self.repository.root
        marks = tuple(_mark(root / name) for name in ("dvc.yaml", "params.yaml"))
        if marks != self._graph[0]:
            self._graph = (marks, read_graph(root))
        return self._graph[1]

    def _read_marks(self, snapshot: Snapshot) -> "Marks":
        root, home = self.repository.root, self.repository.home
        files = [root / name for name in ("dvc.yaml", "params.yaml", "dvc.lock", "code")]
        files += [home / "chains", self.repository.jobs]
        rows = {name: snapshot.rows[name] for name in self._may_move}
        if any(row["limit"] is not None and row["state"] in LIVE for row in rows.values()):
            Scheduler(self.repository).refresh()
        dates = (*map(_mark, files), *_marks_in(self.repository.jobs))
        return Marks(dates, {name: standing(row) for name, row in rows.items()})

    # ---- the pages that are open

    async def changes(
        self, known: str | None, is_ending: Callable[[], bool]
    ) -> AsyncIterator[dict[str, Any] | None]:
        """What has changed since the version that a page has, as it does; None: still here."""
        self._pages += 1
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._keep_looking())
        try:
            sent = self._snapshot if self._snapshot and self._snapshot.version == known else None
            yield None  # the page learns that it is connected
            said = time.monotonic()
            while not is_ending():
                changed, snapshot = self._changed, self._snapshot
                if snapshot is not None and snapshot is not sent:
                    yield snapshot.as_json(sent)
                    sent, said = snapshot, time.monotonic()
                elif time.monotonic() - said > PING_S:
                    yield None
                    said = time.monotonic()
                with suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), LOOK_S)
        finally:
            self._pages -= 1

    async def _keep_looking(self) -> None:
        while self._pages:
            before = self._snapshot
            if await asyncio.to_thread(self.look) is not before:
                changed, self._changed = self._changed, asyncio.Event()
                changed.set()
            await asyncio.sleep(LOOK_S)


def _mark(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


def _marks_in(folder: Path) -> list[tuple[str, int]]:
    """When something was added to each folder in it."""
    try:
        with os.scandir(folder) as found:
            return sorted((each.name, each.stat().st_mtime_ns) for each in found)
    except OSError:
        return []
