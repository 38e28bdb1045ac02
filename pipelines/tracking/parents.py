"""The runs above the stages: one for an invocation, and under it one for each iteration it touched.

They have no files in the ledger; all they say follows from their entries and, once the command has
ended, from dvc.lock: the stages that were up to date are linked to the runs that made them.
"""

import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.base import atomic
from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.config.params import load_params
from pipelines.config.strict_yaml import load_yaml
from pipelines.dvc_repo.lock_file import read_stages
from pipelines.dvc_repo.lock_state import current_stages
from pipelines.ledger.entry import Entry, Ledger
from pipelines.ledger.publish import hashes_of_outs
from pipelines.ledger.record import Origin
from pipelines.ledger.state import State
from pipelines.tracking.cursor import Group, ParentCursor, StageCursor, entry_name, left_behind
from pipelines.tracking.errors import RefusedError
from pipelines.tracking.metrics import Point, names_above, numbers, summary_of
from pipelines.tracking.stage import (
    STATUS,
    ended_at,
    flat_params,
    iteration_of,
    origin_tags,
    started_at,
)
from pipelines.tracking.warnings import WarningTags
from stages.contracts.base import Over
from stages.contracts.catalog import STAGES, BoundStage, bind_all

if TYPE_CHECKING:
    from pipelines.tracking.store import Store

_FINISHED = (State.COMPLETED, State.PUBLISHED)
_BY_WEIGHT = ("RUNNING", "SCHEDULED", "FAILED", "KILLED")
"""Which status of its stages a command bears."""
_OF_A_POLICY = [
    {stage.name for stage in STAGES.values() if stage.over is over}
    for over in (Over.ITERATIONS, Over.PREFERENCES, Over.ONLINE)
]
"""The stages that make one policy and evaluate it."""


@dataclass(frozen=True)
class UpToDate:
    """A stage that was not run because its outputs are there."""

    bound: BoundStage
    outs: dict[str, str]
    """Its outputs with their hashes, without its metrics."""


class ParentShipper:
    """Ships what lies above the stages."""

    def __init__(self, repository: Repository, store: "Store") -> None:
        self._repository = repository
        self._store = store
        self._warnings = WarningTags(repository, store)

    def ensure(self, group: Group) -> ParentCursor:
        """The invocation's run, made if it is not there yet."""
        self._repository.home.joinpath("tracking").mkdir(exist_ok=True)
        cursor = ParentCursor.of(self._repository, group.id, self._store.address)
        if cursor.run_id is None:
            tags = {"lockstep.kind": "invocation", **_tags(group, group.origin)}
            identity = ("lockstep.group", group.id)
            self._store.attach(cursor, identity, _title(group), tags, _began(group))
            cursor.statuses[cursor.run] = "RUNNING"
            cursor.save()
        return cursor

    def above(self, group: Group, entry: Entry, cursor: ParentCursor) -> str:
        """The run that an entry's run belongs under."""
        iteration = iteration_of(entry.spec)
        if iteration is None:
            return cursor.run
        if iteration not in cursor.iterations:
            tags = {
                "mlflow.parentRunId": cursor.run,
                "lockstep.kind": "iteration",
                "lockstep.iteration": iteration,
                **_tags(group, entry.origin),
            }
            run = self._store.find_or_create_run(
                ("lockstep.group", f"{group.id}/{iteration}"), iteration, tags, started_at(entry)
            )
            cursor.iterations[iteration] = run
            cursor.statuses[run] = "RUNNING"
            cursor.save()
        return cursor.iterations[iteration]

    def update(self, group: Group, cursor: ParentCursor) -> None:
        """Numbers and status, from the entries as they are now; nothing once it is final."""
        if cursor.final:
            return
        states = {entry: entry.state() for entry in group.entries}
        for entry, state in states.items():
            if state in _FINISHED and entry_name(entry) not in cursor.measured:
                self._measure(entry, cursor)
        for iteration, run in cursor.iterations.items():
            inside = {e: s for e, s in states.items() if iteration_of(e.spec) == iteration}
            done = {entry.spec.name for entry, state in inside.items() if state in _FINISHED}
            over = group.over or any(done >= stages for stages in _OF_A_POLICY)
            # Without any, another command has taken them over.
            outcome = _worst(list(inside.values())) if inside else "KILLED"
            self._set_status(run, outcome, over, cursor, max(map(ended_at, inside or states)))
        cached = self._close(group, states, cursor) if group.over else {}
        self._warnings.update(group, cursor, cached)
        ended = max(map(ended_at, states), default=_began(group))
        self._set_status(cursor.run, _worst(list(states.values())), group.over, cursor, ended)
        if group.over:
            cursor.entries = {entry_name(entry): state.value for entry, state in states.items()}
            cursor.done, cursor.final = True, group.over_for_sure
            cursor.save()

    def close_left_behind(self, groups: list[Group]) -> None:
        """Close the runs of commands that were killed and whose stages others have taken over."""
        for cursor in left_behind(self._repository, groups, self._store.address):
            for run, status in cursor.statuses.items():
                if status == "RUNNING":
                    with suppress(RefusedError):
                        self._store.set_status(run, "KILLED", time.time())
                    cursor.statuses[run] = "KILLED"
            cursor.save()

    def _measure(self, entry: Entry, cursor: ParentCursor) -> None:
        spec = entry.spec
        summary = summary_of(self._repository.root, entry)
        self._log(spec.name, iteration_of(spec), summary, ended_at(entry), cursor)
        params = flat_params(spec.config)
        new = {key: value for key, value in params.items() if key not in cursor.params}
        self._store.set_params(cursor.run, new)
        cursor.params += new
        cursor.measured.append(entry_name(entry))
        cursor.save()

    def _log(
        self,
        stage: str,
        iteration: str | None,
        summary: dict[str, float],
        at: float,
        cursor: ParentCursor,
    ) -> None:
        named = {
            above: value for name, value in summary.items() for above in names_above(stage, name)
        }
        if iteration in cursor.iterations:
            points = [Point(name, value, at, 0) for name, value in named.items()]
            self._store.log(cursor.iterations[iteration], points)
        step = self._index(iteration)
        points = [Point(name, value, at, step) for name, value in named.items()]
        self._store.log(cursor.run, points)

    def _set_status(
        self, run: str, outcome: str, over: bool, cursor: ParentCursor, ended: float
    ) -> None:
        self._store.if_abandoned(run, "KILLED" if outcome == "RUNNING" else outcome)
        status = outcome if over else "RUNNING"
        if cursor.statuses.get(run) == status:
            return
        self._store.set_status(run, status, None if status == "RUNNING" else ended)
        cursor.statuses[run] = status
        cursor.save()

    def _close(
        self, group: Group, states: dict[Entry, State], cursor: ParentCursor
    ) -> dict[str, str | None]:
        """List all stages for a reader; returns those that were up to date, linked, by run."""
        ran = {entry.stage: (entry, state) for entry, state in states.items()}
        unfinished = {stage for stage, (_, state) in ran.items() if state not in _FINISHED}
        rows = [
            f"| {stage} | {state.value} | {self._link(StageCursor.of(entry).run_id)} |"
            for stage, (entry, state) in ran.items()
        ]
        restored = group.restored.stages if group.restored else ()
        links: dict[str, str | None] = {}
        for item in _up_to_date(self._repository.root, unfinished):
            stage = item.bound.address
            if stage in ran:
                continue
            run = self._maker(item)
            links[stage] = run
            how = "restored" if stage in restored else "up to date"
            rows.append(f"| {stage} | {how} | {self._link(run)} |")
            if stage not in cursor.measured:
                self._measure_cached(item, group, cursor)
                cursor.measured.append(stage)
        note = "\n".join(["| stage | outcome | run |", "| --- | --- | --- |", *rows])
        tags = {f"lockstep.cached.{stage}": run for stage, run in links.items()}
        self._store.set_tags(cursor.run, {"mlflow.note.content": note, **tags})
        return links

    def _measure_cached(self, item: UpToDate, group: Group, cursor: ParentCursor) -> None:
        values = atomic.read_json(self._repository.root / item.bound.metrics) or {}
        iteration = item.bound.key if "@" in item.bound.address else None
        # The time is the invocation's, so that a repeated call sends the very same point.
        at = _began(group)
        self._log(item.bound.stage.name, iteration, numbers(values), at, cursor)

    def _maker(self, item: UpToDate) -> str | None:
        """The run that made these outputs, in this clone's ledger or in one that MLflow knows."""
        for entry in reversed(Ledger(self._repository.jobs).entries()):
            record = entry.record if entry.stage == item.bound.address else None
            if record and record.outs == item.outs:
                cursor = StageCursor.of(entry)
                if cursor.run_id and cursor.store == self._store.address:
                    return cursor.run_id
        tags = {f"lockstep.out.{path}": digest for path, digest in item.outs.items()}
        return self._store.find_run({"lockstep.address": item.bound.address, **tags})

    def _link(self, run: str | None) -> str:
        return f"[{run}]({self._store.fragment(run)})" if run else "not in this MLflow"

    def _index(self, iteration: str | None) -> int:
        """The iteration's place in params.yaml, from 1; what has none is at 0, before the first."""
        if iteration is None:
            return 0
        try:
            names = list(load_params(self._repository.root).rl.family)
        except LockstepError:
            names = []
        if iteration in names:
            return names.index(iteration) + 1
        digits = re.search(r"\d+$", iteration)
        return int(digits[0]) if digits else len(names) + 1


def _up_to_date(root: Path, unfinished: set[str]) -> list[UpToDate]:
    """Every stage of the graph that dvc.lock vouches for, in the graph's order.

    `unfinished` names stages that were tried and did not end well.
    """
    try:
        nodes = bind_all(load_params(root))
        recorded = read_stages(root)
        current = current_stages(recorded, load_yaml(root / "params.yaml"), unfinished)
    except LockstepError:
        return []
    outs = {node.address: hashes_of_outs(recorded.get(node.address, {})) for node in nodes}
    return [
        UpToDate(node, {path: outs[node.address][path] for path in node.outs.values()})
        for node in nodes
        if node.address in current and outs[node.address].keys() >= set(node.outs.values())
    ]


def _title(group: Group) -> str:
    """What tells two runs apart comes first: MLflow's lists cut a name short."""
    origin = group.origin
    return " · ".join(filter(None, [origin.title, origin.experiment, group.command]))


def _began(group: Group) -> float:
    restored = group.restored.time if group.restored else 0.0
    return min(map(started_at, group.entries), default=restored)


def _tags(group: Group, origin: Origin) -> dict[str, str | None]:
    return {"lockstep.invocation": group.id, **origin_tags(origin)}


def _worst(states: list[State]) -> str:
    statuses = {STATUS[state] for state in states if state is not State.NEW}
    return next((s for s in _BY_WEIGHT if s in statuses), "FINISHED")
