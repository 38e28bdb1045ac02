"""All that is known about makings: dvc.lock, the ledger and the git history, joined.

A record of dvc.lock and an entry of the ledger are the same making when the stage, the outputs, the
inputs, the params and the files of the code agree. An artifact is a path with a hash; who made it
and who read it is looked up by both. Where several makings left the same bytes at the same path,
one that was recorded together with the reader comes first, then the workspace's, then the newest
job's, then the newest commit's.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pipelines.base.repository import Repository
from pipelines.identity.map_files import KnownMaps
from pipelines.lineage.history import LOCK_FILE, Commit, History
from pipelines.lineage.jobs import read_ledger
from pipelines.lineage.locks import LockReader
from pipelines.lineage.making import Job, Lock, Making, unique

WORKSPACE = "workspace"
Records = Mapping[str, Mapping[str, Any]]
"""What a dvc.lock says of each stage."""


@dataclass(frozen=True)
class Artifact:
    """Bytes at a path."""

    path: str
    hash: str


@dataclass
class Evidence:
    """Every making that the records tell of, by what it made and what it read."""

    makings: list[Making]
    """Those of the workspace first, then those with a job, newest first, then by commit."""
    workspace: Lock | None = None
    locks: dict[str, Lock] = field(default_factory=dict)
    """By commit, newest first."""
    commits: dict[str, Commit] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What could not be read."""

    def __post_init__(self) -> None:
        self._made: dict[Artifact, list[Making]] = defaultdict(list)
        self._read: dict[Artifact, list[Making]] = defaultdict(list)
        self._kept_in: dict[int, list[Lock]] = defaultdict(list)
        self._by_stage: dict[str, list[Making]] = defaultdict(list)
        for lock in ([self.workspace] if self.workspace else []) + list(self.locks.values()):
            for making in lock.stages.values():
                self._kept_in[id(making)].append(lock)
        for making in self.makings:
            self._index(making)

    def add(self, making: Making) -> None:
        """One more making, from elsewhere."""
        self.makings.append(making)
        self._index(making)

    def with_jobs(self, jobs: Mapping[int, Job]) -> "Evidence":
        """The same, with jobs that were found elsewhere, by the identity of their makings."""
        new = {
            id(making): replace(making, jobs=(jobs[id(making)],))
            for making in self.makings
            if id(making) in jobs
        }

        def renewed(lock: Lock) -> Lock:
            stages = {stage: new.get(id(item), item) for stage, item in lock.stages.items()}
            return Lock(lock.name, lock.time, stages)

        return Evidence(
            [new.get(id(making), making) for making in self.makings],
            renewed(self.workspace) if self.workspace else None,
            {sha: renewed(lock) for sha, lock in self.locks.items()},
            self.commits,
            self.notes,
        )

    def _index(self, making: Making) -> None:
        self._by_stage[making.stage].append(making)
        for path, digest in making.outs.items():
            self._made[Artifact(path, digest)].append(making)
        for path, digest in making.inputs.items():
            self._read[Artifact(path, digest)].append(making)

    def makers(self, artifact: Artifact, beside: Lock | None = None) -> list[Making]:
        """Who made it, the likeliest first: `beside` is the lock that its reader was found in."""
        found = self._made.get(artifact, [])
        if beside is None:
            return list(found)
        return sorted(found, key=lambda making: beside.stages.get(making.stage) is not making)

    def inside(self, reader: Making, folder: str) -> list[Artifact]:
        """What a folder held that a stage read as a whole, by the records made together with it.

        The folder's own hash says nothing about its parts. The list that the job was given does;
        without it, the first lock that has the reader, which was whole when the reader ran. Later
        locks may keep the reader's record beside newer ones.
        """
        kept = self._kept_in.get(id(reader), [])
        together = self._told(reader) or (list(kept[-1].stages.values()) if kept else [])
        return [
            Artifact(path, digest)
            for making in together
            for path, digest in making.outs.items()
            if path.startswith(f"{folder}/")
        ]

    def _told(self, reader: Making) -> list[Making]:
        """The makings that a report's job was told of, if all of them are known."""
        graph = reader.job.graph if reader.job else {}
        found = []
        for stage, outs in graph.items():
            if stage != reader.stage:
                of_stage = self._by_stage.get(stage, [])
                found += [m for m in of_stage if outs and outs.items() <= m.outs.items()][:1]
        return found if len(found) >= len(graph) - 1 else []

    def readers(self, artifact: Artifact) -> list[Making]:
        """Who read it, by itself or as a part of a folder."""
        return unique([*self._read.get(artifact, []), *self._parts_read.get(artifact, [])])

    @cached_property
    def _parts_read(self) -> dict[Artifact, list[Making]]:
        """Who read what as a part of a folder."""
        found: dict[Artifact, list[Making]] = defaultdict(list)
        for making in self.makings:
            for path, digest in making.inputs.items():
                if Artifact(path, digest) not in self._made:
                    for part in self.inside(making, path):
                        found[part].append(making)
        return found

    def lock_of(self, making: Making, beside: Lock | None = None) -> Lock | None:
        """A lock that has the making: the one given, or the newest."""
        kept = self._kept_in.get(id(making), [])
        if beside is not None and any(lock is beside for lock in kept):
            return beside
        return kept[0] if kept else None

    def artifacts(self) -> list[Artifact]:
        """Everything ever made or read, once each; what was made first."""
        return list(dict.fromkeys([*self._made, *self._read]))


def gather(repository: Repository) -> Evidence:
    """Read everything that this clone has."""
    notes: list[str] = []
    reader, history = LockReader(), History(repository.root)
    joiner = _Joiner(read_ledger(repository, notes), KnownMaps(repository))
    commits = {commit.sha: commit for commit in history.commits()}
    blobs = history.lock_blobs(commits)
    records: dict[str, Records] = {}
    for blob, text in history.contents(dict.fromkeys(blobs.values())):
        try:
            records[blob] = reader.read(text)
        except ValueError as error:
            sha = next(sha for sha, other in blobs.items() if other == blob)
            notes.append(f"{LOCK_FILE} of commit {sha[:7]} is left out: {error}")
    here = _workspace_records(repository, reader, notes)
    for sha in reversed(blobs):
        joiner.note(records.get(blobs[sha], {}), sha)
    joiner.note(here, WORKSPACE)
    stages = {blob: joiner.join(found) for blob, found in records.items()}
    locks = {
        sha: Lock(sha, commits[sha].time, stages[blob])
        for sha, blob in blobs.items()
        if blob in stages
    }
    workspace = Lock(WORKSPACE, 0.0, joiner.join(here)) if here else None
    makings = _ordered([*joiner.joined(), *joiner.jobs_alone()], commits)
    return Evidence(makings, workspace, locks, commits, notes)


def _workspace_records(repository: Repository, reader: LockReader, notes: list[str]) -> Records:
    path = repository.root / LOCK_FILE
    try:
        return reader.read(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append(f"the workspace has no {LOCK_FILE}: the ledger and the history answer")
    except (ValueError, OSError) as error:
        notes.append(f"{LOCK_FILE} is left out: {error}")
    return {}


def _ordered(makings: Iterable[Making], commits: Mapping[str, Commit]) -> list[Making]:
    """The workspace's, then those with a job, newest first, then by the commit that has them."""

    def rank(making: Making) -> tuple[bool, bool, float]:
        recorded = max((commits[sha].time for sha in making.commits), default=0.0)
        when = (making.job.ended if making.job else None) or recorded
        return (not making.in_workspace, making.job is None, -when)

    return sorted(makings, key=rank)


class _Joiner:
    """Makes each record of dvc.lock one making, with the jobs that did exactly that."""

    def __init__(self, jobs: list[Making], maps: KnownMaps) -> None:
        self._maps = maps
        self._by_stage: dict[str, list[Making]] = defaultdict(list)
        for job in sorted(jobs, key=lambda job: -(_job_of(job).ended or 0.0)):
            self._by_stage[job.stage].append(job)
        self._places: dict[int, dict[str, None]] = defaultdict(dict)
        self._makings: dict[int, Making] = {}
        self._used: set[int] = set()

    def note(self, records: Records, place: str) -> None:
        """A commit, or the workspace, has these records."""
        for record in records.values():
            self._places[id(record)][place] = None

    def join(self, records: Records) -> dict[str, Making]:
        return {stage: self._making(stage, record) for stage, record in records.items()}

    def joined(self) -> list[Making]:
        return list(self._makings.values())

    def jobs_alone(self) -> list[Making]:
        """What only the ledger knows; the same computed twice is one making with two jobs."""
        alone: dict[str, Making] = {}
        for job in (job for jobs in self._by_stage.values() for job in jobs):
            if id(job) not in self._used:
                making = replace(job, code=self._maps.get(job.code_version) or {})
                known = alone.get(making.id)
                alone[making.id] = (
                    replace(known, jobs=(*known.jobs, *making.jobs)) if known else making
                )
        return list(alone.values())

    def _making(self, stage: str, record: Mapping[str, Any]) -> Making:
        key = id(record)
        if key not in self._makings:
            places = self._places[key]
            matching = [job for job in self._by_stage[stage] if _is_same(record, job)]
            self._used.update(id(job) for job in matching)
            version = next(iter(record["code"].values()), None)
            # What a job knows is complete: dvc.lock has only the params that params.yaml names.
            params = {**(matching[0].params if matching else {}), **record["params"]}
            self._makings[key] = Making(
                stage=stage,
                params=params,
                inputs=record["inputs"],
                code=self._maps.get(version) or {},
                outs=record["outs"],
                code_version=version,
                jobs=tuple(_job_of(job) for job in matching),
                commits=tuple(place for place in places if place != WORKSPACE),
                in_workspace=WORKSPACE in places,
            )
        return self._makings[key]


def _job_of(making: Making) -> Job:
    return making.jobs[0]


def _is_same(record: Mapping[str, Any], job: Making) -> bool:
    """Whether the job is the one whose outcome DVC recorded."""
    shared = record["params"].keys() & job.params.keys()
    return (
        job.outs.items() <= record["outs"].items()
        and job.inputs.items() <= record["inputs"].items()
        and all(record["params"][key] == job.params[key] for key in shared)
        and (not record["code"] or job.code_version in record["code"].values())
    )
