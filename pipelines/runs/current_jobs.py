"""Which job of the ledger belongs to what the workspace is now.

The ledger has a job for everything that was ever asked for: with other params, from other code, of
inputs that are gone. The one that counts for a stage has the stage's fingerprint of now. Its inputs
may still be on their way. Then the outputs of the jobs before it stand for them; where not even
those are known, only a live job counts, and only with the params and the code of now.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath

from pipelines.base.repository import Repository
from pipelines.dvc_repo.plan import PlannedStage
from pipelines.dvc_repo.pruned import read_pruned
from pipelines.identity.code import code_version
from pipelines.identity.hashing import HashCache
from pipelines.identity.spec import spec_of
from pipelines.ledger.entry import Entry, Ledger
from stages.contracts.catalog import BoundStage


@dataclass(frozen=True)
class StageJob:
    """One stage, with the job that belongs to it."""

    planned: PlannedStage
    entry: Entry | None
    """Its newest job that computes, or has computed, what the stage is now."""
    other: Entry | None
    """A live job of the stage that computes something else."""
    is_last: bool = False
    """Whether no later job of the stage is in the ledger."""


class CurrentJobs:
    """Looks through the ledger once, stage by stage in the graph's order."""

    def __init__(self, repository: Repository, nodes: Mapping[str, BoundStage]) -> None:
        self._root = repository.root
        self._hashes = HashCache(repository.home / "hashes.json")
        self._hash = cache(self._hashes.of)
        self._pruned = read_pruned(repository.root)
        self._code = cache(lambda module: code_version(self._root, module, repository.home))
        self._nodes = nodes
        self._entries: dict[str, list[Entry]] = {}
        for entry in Ledger(repository.jobs).entries():
            self._entries.setdefault(entry.stage, []).append(entry)
        self._fresh: set[str] = set()
        self._made: dict[str, str] = {}
        """The hash of what jobs have made that DVC has not recorded yet, by path."""
        self._makers = {
            path: node.address
            for node in nodes.values()
            for path in (*node.outs.values(), node.metrics)
        }
        self._inside: dict[str, set[str]] = {}
        for path, address in self._makers.items():
            for folder in PurePosixPath(path).parents:
                self._inside.setdefault(str(folder), set()).add(address)

    def of(self, plan: list[PlannedStage]) -> Iterator[StageJob]:
        """The job of each stage of the plan; stages that params.yaml does not name are left out."""
        for planned in plan:
            if planned.address in self._nodes:
                yield self._of(planned)
        self._hashes.save()

    def is_wanted(self, address: str, config: object, code: str) -> bool:
        """Whether these are the params and the code of the stage as they are now."""
        bound = self._nodes[address]
        same = bound.config.values(bound.key) == config
        return same and self._code(bound.stage.module) == code

    def _of(self, planned: PlannedStage) -> StageJob:
        if not planned.stale:
            self._fresh.add(planned.address)
        bound = self._nodes[planned.address]
        entries = self._entries.get(planned.address, [])
        wanted = self._fingerprint(bound)
        entry = next(filter(lambda it: self._counts(it, bound, wanted), reversed(entries)), None)
        if entry is not None and planned.stale and entry.outs:
            self._made |= entry.outs
        live = (it for it in reversed(entries) if it != entry and it.state().alive)
        return StageJob(planned, entry, next(live, None), bool(entries) and entries[-1] == entry)

    def _counts(self, entry: Entry, bound: BoundStage, wanted: str | None) -> bool:
        spec = entry.spec
        if wanted is not None:
            return spec.fingerprint == wanted
        return self.is_wanted(bound.address, spec.config, spec.code) and entry.state().alive

    def _fingerprint(self, bound: BoundStage) -> str | None:
        """Of the stage as it is now; None while something that it reads is not known."""
        inputs = {}
        for path in bound.inputs.values():
            digest = self._input(path)
            if digest is None:
                return None
            inputs[path] = digest
        return spec_of(bound, self._code(bound.stage.module), inputs).fingerprint

    def _input(self, path: str) -> str | None:
        if path in self._made:
            return self._made[path]
        if path in self._pruned:
            return self._pruned[path]
        around = (self._makers.get(str(folder)) for folder in PurePosixPath(path).parents)
        makers = {self._makers.get(path), *around, *self._inside.get(path, ())} - {None}
        if not makers <= self._fresh or not (self._root / path).exists():
            return None
        try:
            return self._hash(self._root / path)
        except OSError:
            return None  # on its way, or gone since
