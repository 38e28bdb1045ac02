"""The index of all known stage runs: dvc.lock, the ledger and the git history, joined.

A record of dvc.lock and an entry of the ledger are the same stage run when stage, outputs, inputs,
params and code files agree. An artifact is a path with a hash; its producer and its readers are
looked up by both. Where several stage runs left the same bytes at the same path,
one that was recorded together with the reader comes first, then the workspace's, then the newest
job's, then the newest commit's.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from pipelines.base.git import blob_contents
from pipelines.base.repository import Repository
from pipelines.identity.map_files import KnownMaps
from pipelines.identity.spec import Artifact
from pipelines.lineage.dvc_lock import LockReader, Record
from pipelines.lineage.history import LOCK_FILE, lock_blobs, lock_commits
from pipelines.lineage.jobs import read_ledger
from pipelines.lineage.stage_run import Job, Lock, StageRun

WORKSPACE = "workspace"
Records = Mapping[str, Record]
"""What a dvc.lock says of each stage."""


@dataclass
class RunIndex:
    """Every recorded stage run, indexed by what it produced and what it read."""

    stage_runs: list[StageRun]
    """Those of the workspace first, then those with a job, newest first, then by commit."""
    workspace: Lock | None = None
    locks: dict[str, Lock] = field(default_factory=dict)
    """By commit, newest first."""
    notes: list[str] = field(default_factory=list)
    """What could not be read."""

    def __post_init__(self) -> None:
        self._made: dict[Artifact, list[StageRun]] = defaultdict(list)
        self._read: dict[Artifact, list[StageRun]] = defaultdict(list)
        self._kept_in: dict[StageRun, list[Lock]] = defaultdict(list)
        self._by_stage: dict[str, list[StageRun]] = defaultdict(list)
        for lock in filter(None, (self.workspace, *self.locks.values())):
            for stage_run in lock.stages.values():
                self._kept_in[stage_run].append(lock)
        for stage_run in self.stage_runs:
            self._index(stage_run)

    def add(self, stage_run: StageRun) -> None:
        """One more stage run, from elsewhere."""
        self.stage_runs.append(stage_run)
        self._index(stage_run)

    def with_jobs(self, jobs: Mapping[StageRun, Job]) -> "RunIndex":
        """A copy with jobs from elsewhere added to their stage runs."""
        new = {stage_run: replace(stage_run, jobs=(job,)) for stage_run, job in jobs.items()}

        def renewed(lock: Lock) -> Lock:
            return Lock(lock.name, {name: new.get(it, it) for name, it in lock.stages.items()})

        return RunIndex(
            [new.get(stage_run, stage_run) for stage_run in self.stage_runs],
            renewed(self.workspace) if self.workspace else None,
            {sha: renewed(lock) for sha, lock in self.locks.items()},
            self.notes,
        )

    def _index(self, stage_run: StageRun) -> None:
        self._by_stage[stage_run.stage].append(stage_run)
        for path, digest in stage_run.outs.items():
            self._made[Artifact(path, digest)].append(stage_run)
        for path, digest in stage_run.inputs.items():
            self._read[Artifact(path, digest)].append(stage_run)

    def makers(self, artifact: Artifact, beside: Lock | None = None) -> list[StageRun]:
        """Who produced it, the likeliest first: `beside` is the lock that has its reader."""
        makers = self._made.get(artifact, [])
        if beside is None:
            return list(makers)
        return sorted(makers, key=lambda maker: beside.stages.get(maker.stage) is not maker)

    def inside(self, reader: StageRun, folder: str) -> list[Artifact]:
        """The artifacts inside a folder that a stage read as a whole.

        The folder's own hash says nothing about its parts. The graph that the job was given does;
        without it, the first lock that has the reader, which was complete when the reader ran.
        Later locks may keep the reader's record beside newer ones.
        """
        kept = self._kept_in.get(reader, [])
        together = self._graph_runs(reader) or (list(kept[-1].stages.values()) if kept else [])
        return [
            Artifact(path, digest)
            for stage_run in together
            for path, digest in stage_run.outs.items()
            if path.startswith(f"{folder}/")
        ]

    def _graph_runs(self, reader: StageRun) -> list[StageRun]:
        """The stage runs in the graph of a report's job, if all of them are known."""
        graph = reader.job.graph if reader.job else {}
        stage_runs: list[StageRun] = []
        for stage, outs in graph.items():
            if stage != reader.stage:
                of_stage = self._by_stage.get(stage, [])
                stage_runs += [m for m in of_stage if outs and outs.items() <= m.outs.items()][:1]
        return stage_runs if len(stage_runs) >= len(graph) - 1 else []

    def readers(self, artifact: Artifact) -> list[StageRun]:
        """Who read it, by itself or as part of a folder."""
        both = (*self._read.get(artifact, []), *self._parts_read.get(artifact, []))
        return list(dict.fromkeys(both))

    @cached_property
    def _parts_read(self) -> dict[Artifact, list[StageRun]]:
        """The readers of artifacts that were read as part of a folder."""
        readers: dict[Artifact, list[StageRun]] = defaultdict(list)
        for stage_run in self.stage_runs:
            for path, digest in stage_run.inputs.items():
                if Artifact(path, digest) not in self._made:
                    for part in self.inside(stage_run, path):
                        readers[part].append(stage_run)
        return readers

    def lock_of(self, stage_run: StageRun, beside: Lock | None = None) -> Lock | None:
        """A lock that has the stage run: the one given, or the newest."""
        kept = self._kept_in.get(stage_run, [])
        if beside in kept:
            return beside
        return kept[0] if kept else None

    def artifacts(self) -> list[Artifact]:
        """Everything ever produced or read, once each; outputs first."""
        return list(dict.fromkeys([*self._made, *self._read]))


def gather(repository: Repository) -> RunIndex:
    """Read all records of this clone."""
    notes: list[str] = []
    reader, root = LockReader(), repository.root
    joiner = _Joiner(read_ledger(repository, notes), KnownMaps(repository))
    commits = lock_commits(root)
    blobs = lock_blobs(root, commits)
    records: dict[str, Records] = {}
    for blob, text in blob_contents(root, dict.fromkeys(blobs.values())):
        try:
            records[blob] = reader.read(text)
        except ValueError as error:
            sha = next(sha for sha, other in blobs.items() if other == blob)
            notes.append(f"{LOCK_FILE} of commit {sha[:7]} is skipped: {error}")
    here = _workspace_records(root / LOCK_FILE, reader, notes)
    for sha in reversed(blobs):
        joiner.note(records.get(blobs[sha], {}), sha)
    joiner.note(here, WORKSPACE)
    stages = {blob: joiner.join(lock_records) for blob, lock_records in records.items()}
    locks = {sha: Lock(sha, stages[blob]) for sha, blob in blobs.items() if blob in stages}
    workspace = Lock(WORKSPACE, joiner.join(here)) if here else None
    stage_runs = _ordered([*joiner.joined(), *joiner.jobs_alone()], commits)
    return RunIndex(stage_runs, workspace, locks, notes)


def _workspace_records(path: Path, reader: LockReader, notes: list[str]) -> Records:
    try:
        return reader.read(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append(f"the workspace has no {LOCK_FILE}: using the ledger and the git history")
    except (ValueError, OSError) as error:
        notes.append(f"{LOCK_FILE} is skipped: {error}")
    return {}


def _ordered(stage_runs: Iterable[StageRun], commits: Mapping[str, float]) -> list[StageRun]:
    """The workspace's, then those with a job, newest first, then by the commit that has them."""

    def rank(stage_run: StageRun) -> tuple[bool, bool, float]:
        recorded = max((commits[sha] for sha in stage_run.commits), default=0.0)
        when = (stage_run.job.ended if stage_run.job else None) or recorded
        return (not stage_run.in_workspace, stage_run.job is None, -when)

    return sorted(stage_runs, key=rank)


class _Joiner:
    """Joins each record of dvc.lock with the jobs that computed exactly that."""

    def __init__(self, jobs: list[StageRun], maps: KnownMaps) -> None:
        self._maps = maps
        self._by_stage: dict[str, list[StageRun]] = defaultdict(list)
        for job in sorted(jobs, key=lambda job: -(job.jobs[0].ended or 0.0)):
            self._by_stage[job.stage].append(job)
        self._places: dict[int, dict[str, None]] = defaultdict(dict)
        self._stage_runs: dict[int, StageRun] = {}
        self._used: set[StageRun] = set()

    def note(self, records: Records, place: str) -> None:
        """A commit, or the workspace, has these records."""
        for record in records.values():
            self._places[id(record)][place] = None

    def join(self, records: Records) -> dict[str, StageRun]:
        return {stage: self._stage_run(stage, record) for stage, record in records.items()}

    def joined(self) -> list[StageRun]:
        return list(self._stage_runs.values())

    def jobs_alone(self) -> list[StageRun]:
        """Stage runs that only the ledger has; the same computed twice has two jobs."""
        alone: dict[str, StageRun] = {}
        for job in (job for jobs in self._by_stage.values() for job in jobs):
            if job not in self._used:
                stage_run = replace(job, code=self._maps.get(job.code_version) or {})
                if known := alone.get(stage_run.id):
                    stage_run = replace(known, jobs=(*known.jobs, *stage_run.jobs))
                alone[stage_run.id] = stage_run
        return list(alone.values())

    def _stage_run(self, stage: str, record: Record) -> StageRun:
        key = id(record)
        if key not in self._stage_runs:
            places = self._places[key]
            matching = [job for job in self._by_stage[stage] if _is_same(record, job)]
            self._used.update(matching)
            # A job's record is complete: dvc.lock has only the params that params.yaml names.
            params = {**(matching[0].params if matching else {}), **record["params"]}
            version = next(iter(record["code"].values()), None)
            self._stage_runs[key] = StageRun(
                stage=stage,
                params=params,
                inputs=record["inputs"],
                code=self._maps.get(version) or {},
                outs=record["outs"],
                code_version=version,
                jobs=tuple(job.jobs[0] for job in matching),
                commits=tuple(place for place in places if place != WORKSPACE),
                in_workspace=WORKSPACE in places,
            )
        return self._stage_runs[key]


def _is_same(record: Record, job: StageRun) -> bool:
    """Whether the job is the one whose outcome DVC recorded."""
    shared = record["params"].keys() & job.params.keys()
    return (
        job.outs.items() <= record["outs"].items()
        and job.inputs.items() <= record["inputs"].items()
        and all(record["params"][key] == job.params[key] for key in shared)
        and (not record["code"] or job.code_version in record["code"].values())
    )
