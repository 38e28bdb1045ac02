"""Warnings as tags of runs: `lockstep.warning.KIND` is the sentence.

A stage's run has those of its stage, an iteration's run those of all its stages, the invocation's
run those of every stage that it ran or found up to date. A tag goes away with its warning. What is
judged are the numbers and thresholds of now: an invocation that reruns the report alone, because
a threshold was changed, also corrects the runs of the stages that it found up to date.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipelines.base.repository import Repository
from pipelines.ledger.entry import Entry, Ledger
from pipelines.tracking.cursor import Group, ParentCursor, StageCursor
from pipelines.tracking.errors import RefusedError
from pipelines.tracking.health import Health
from pipelines.tracking.stage import iteration_of

if TYPE_CHECKING:
    from pipelines.tracking.store import Store

PREFIX = "lockstep.warning."

Tags = dict[str, str]


class WarningTags:
    """Keeps the tags of an invocation's runs in step with the judgement."""

    def __init__(self, repository: Repository, store: "Store") -> None:
        self._store = store
        self._ledger = Ledger(repository.jobs)
        self._health = Health(repository.root)
        self._sent: dict[str, Tags] = {}
        """What each run has, as far as this process knows."""

    def update(self, group: Group, cursor: ParentCursor, cached: Mapping[str, str | None]) -> None:
        """Tag the runs of the group's stages and of those found up to date, and the runs above."""
        latest = self._ledger.latest()
        of_iterations: dict[str, Tags] = {run: {} for run in cursor.iterations.values()}
        of_all: Tags = {}
        for stage, run in cached.items():
            tags = self._judge(stage, latest.get(stage))
            of_all |= tags
            if run is not None:
                self._set(run, tags, steady=True)
        for entry in group.entries:
            if entry.stage not in latest or latest[entry.stage].folder != entry.folder:
                continue  # computed anew since: the workspace does not speak of it any more
            tags = self._judge(entry.stage, entry)
            of_all |= tags
            iteration = iteration_of(entry.spec)
            if iteration in cursor.iterations:
                of_iterations[cursor.iterations[iteration]] |= tags
            run = StageCursor.of(entry, self._store.address).run_id
            if run is not None:
                self._set(run, tags, steady=not entry.state().alive)
        for run, tags in {**of_iterations, cursor.run: of_all}.items():
            self._set(run, tags, steady=group.over)

    def _judge(self, stage: str, entry: Entry | None) -> Tags:
        symptoms = self._health.of(stage, entry, now=True)
        return {PREFIX + symptom.kind: symptom.sentence for symptom in symptoms}

    def _set(self, run: str, tags: Tags, *, steady: bool) -> None:
        """Send what has changed; of a number that still moves, only whether there is a warning."""
        try:
            known = self._sent.get(run)
            if known is None:
                known = self._store.tags(run, PREFIX)
            if tags != known and (steady or tags.keys() != known.keys()):
                self._store.drop_tags(run, known.keys() - tags.keys())
                self._store.set_tags(run, tags)
                known = tags
        except RefusedError:
            known = tags  # somebody has deleted the run: it stays away
        self._sent[run] = known
