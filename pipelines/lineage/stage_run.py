"""A stage run: one execution of a stage that turned inputs into outputs, as the records show it.

dvc.lock and the job ledger describe the same stage run from two sides. dvc.lock has its params,
inputs, code files and outputs, all by hash; the ledger has the job: commit, machine, attempts,
MLflow run. Either may be missing. Nothing here is read from the artifacts themselves.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.identity.spec import Artifact
from pipelines.lineage.naming import role_of

SHORT = 8
"""Characters of a hash that are shown to people."""


@dataclass(frozen=True)
class AttemptRecord:
    """One submission of a job."""

    number: int
    executor: str | None
    profile: str | None
    job: str | None
    host: str | None
    state: str


@dataclass(frozen=True)
class Job:
    """Who computed it, where, and from which commit."""

    entry: str
    """Of the ledger: `sft/5df4bf35b091-001`; of a run alone, the run's id."""
    state: str
    commit: str | None
    uncommitted: tuple[str, ...] = ()
    """Files whose code or params differed from the commit."""
    experiment: str | None = None
    command: str | None = None
    fingerprint: str | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    earlier_environments: tuple[Mapping[str, Any], ...] = ()
    """Other kinds of machine that computed part of it: before a preemption, or as a shard."""
    started: float | None = None
    ended: float | None = None
    attempts: tuple[AttemptRecord, ...] = ()
    mlflow_run: str | None = None
    mlflow_url: str | None = None
    folder: Path | None = None
    graph: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """For a report: the outputs of each stage before it, by hash."""

    def as_json(self) -> dict[str, Any]:
        """All but what is of use in this clone alone."""
        return {key: v for key, v in asdict(self).items() if key not in ("folder", "graph")}


@dataclass(frozen=True, eq=False)
class StageRun:
    """A stage, what went in and what came out. Hashes are DVC's. Equal only to itself."""

    stage: str
    """The address: `rollout@iter_001`."""
    params: Mapping[str, Any]
    """By dotted name."""
    inputs: Mapping[str, str]
    """Path and hash of each artifact it read."""
    code: Mapping[str, str]
    """Path and digest of each file of its code; empty where that is not known."""
    outs: Mapping[str, str]
    code_version: str | None = None
    """The md5 of its code map, the same in every clone; None where it is not known."""
    jobs: tuple[Job, ...] = ()
    """The jobs that computed exactly this, newest first; several where it was forced."""
    commits: tuple[str, ...] = ()
    """The commits whose dvc.lock records it, oldest first."""
    in_workspace: bool = False
    """Whether the workspace's dvc.lock records it."""

    @property
    def job(self) -> Job | None:
        return self.jobs[0] if self.jobs else None

    @property
    def name(self) -> str:
        return self.stage.partition("@")[0]

    @property
    def key(self) -> str:
        return self.stage.partition("@")[2]

    @cached_property
    def id(self) -> str:
        """Twelve characters, unique to this stage run."""
        identity = [self.stage, self.params, self.inputs, self.code_version, self.outs]
        text = json.dumps(identity, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def environment(self) -> dict[str, Any]:
        """The machine's, by dotted name; empty where no record of the job is left."""
        return flatten(self.job.environment) if self.job else {}

    @property
    def environments(self) -> list[dict[str, Any]]:
        """The same for every kind of machine that computed part of it, the last one last."""
        earlier = self.job.earlier_environments if self.job else ()
        return [*map(flatten, earlier), self.environment]

    @property
    def commit(self) -> str | None:
        """The commit its code came from; without a job's record, the first commit that has it."""
        if self.job and self.job.commit:
            return self.job.commit.rstrip("+")
        return self.commits[0] if self.commits else None

    def artifact(self, role: str, *, among_inputs: bool) -> Artifact | None:
        """What its contract calls by this name; None where its record has no such path."""
        paths = self.inputs if among_inputs else self.outs
        for path, digest in paths.items():
            if role_of(self.stage, path, among_inputs=among_inputs) == role:
                return Artifact(path, digest)
        return None

    def required(self, role: str, *, among_inputs: bool) -> Artifact:
        """The same; LockstepError where its record has no such path."""
        artifact = self.artifact(role, among_inputs=among_inputs)
        if artifact is None:
            kind = "input" if among_inputs else "output"
            raise LockstepError(f"{self.stage}: its record names no {kind} `{role}`: rerun it")
        return artifact


@dataclass(frozen=True, eq=False)
class Lock:
    """A dvc.lock: the state of the whole graph that was recorded together."""

    name: str
    """`workspace`, or a commit."""
    stages: Mapping[str, StageRun]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping under dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def short_hash(digest: str) -> str:
    return digest[:SHORT]
