"""Resolves the name that a user types to an artifact or a stage run.

A revision limits the search to its dvc.lock. Without one, the workspace's dvc.lock comes first,
then the ledger, newest job first, then the git history, newest commit first: the order in which the
index lists its stage runs. For an unknown or ambiguous name the error lists valid names.
"""

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice, product, starmap
from pathlib import Path, PurePosixPath
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.identity.spec import Artifact
from pipelines.lineage.history import LOCK_FILE, lock_blobs, resolve
from pipelines.lineage.naming import paths_called, short_name
from pipelines.lineage.run_index import RunIndex
from pipelines.lineage.stage_run import Lock, StageRun

PROMPT = "prompt:"
Match = tuple[Artifact | None, StageRun | None]
"""An artifact and its maker, if known; a stage run alone means all its outputs."""
_HEX = re.compile(r"[0-9a-f]{6,64}(\.dir)?")
_MOST = 8


@dataclass(frozen=True)
class Target:
    """An artifact, or all outputs of one stage run."""

    text: str
    artifact: Artifact | None
    stage_run: StageRun | None
    """None for given data, which no stage here produced."""
    lock: Lock | None
    """The dvc.lock that has it, if any."""

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.text,
            "path": self.artifact.path if self.artifact else None,
            "hash": self.artifact.hash if self.artifact else None,
            "stage": self.stage_run.stage if self.stage_run else None,
        }

    @property
    def title(self) -> str:
        if self.artifact is not None:
            return short_name(self.artifact.path)
        assert self.stage_run is not None
        return self.stage_run.stage


@dataclass(frozen=True)
class Resolver:
    """Finds targets among the records of one clone."""

    run_index: RunIndex
    root: Path

    def revision(self, text: str) -> tuple[Lock | None, str]:
        """Split a revision off a name: its lock, and the rest."""
        before, colon, rest = text.partition(":")
        if not colon or before == PROMPT.rstrip(":"):
            return None, text
        commit = resolve(self.root, before)
        if commit is None:
            raise LockstepError(
                f"{text}: git knows no revision or DVC experiment {before!r}; `git log --oneline "
                f"--all -- {LOCK_FILE}` lists commits with results"
            )
        lock = self._lock_at(commit)
        if lock is None:
            raise LockstepError(f"{before} ({commit[:7]}) has no {LOCK_FILE}: nothing was recorded")
        return lock, rest

    def _lock_at(self, commit: str) -> Lock | None:
        """The lock that a commit has, which an earlier commit may have introduced."""
        if commit in self.run_index.locks:
            return self.run_index.locks[commit]
        blobs = lock_blobs(self.root, [commit, *self.run_index.locks])
        wanted = blobs.get(commit, "")
        locks = self.run_index.locks.items()
        return next((lock for sha, lock in locks if blobs.get(sha) == wanted), None)

    def find(self, text: str) -> Target:
        """The target of a name; for an unknown one, LockstepError lists similar names."""
        lock, name = self.revision(text)
        name = name.strip()
        if name.startswith(PROMPT):
            raise LockstepError(f"{text}: a prompt is not an artifact; ask about it alone")
        stage_runs = list(lock.stages.values()) if lock else self.run_index.stage_runs
        digest = name.lower() if _HEX.fullmatch(name.lower()) else None
        match = (
            _by_stage(name, stage_runs)
            or _by_path([self._relative(name), *paths_called(name)], stage_runs)
            or _by_run(name, stage_runs)
            or (digest and _by_hash(text, digest, stage_runs))
            or (digest and _by_code(text, digest, stage_runs))
        )
        if not match:
            raise LockstepError(self._unknown(text, name, lock))
        artifact, maker = match
        if maker is None and artifact is not None:
            maker = next(iter(self.run_index.makers(artifact, lock)), None)
        if lock is None and maker is not None:
            lock = self.run_index.lock_of(maker)
        return Target(text, artifact, maker, lock)

    def _relative(self, name: str) -> str:
        """A path as dvc.lock has it: relative to the repository's root, no trailing slash."""
        here = Path(os.path.normpath(Path.cwd() / name))
        for path in (here, Path(os.path.normpath(self.root / name))):
            if path.is_relative_to(self.root):
                relative = path.relative_to(self.root).as_posix()
                if any(_touches(item.path, relative) for item in self.run_index.artifacts()):
                    return relative
        return PurePosixPath(name).as_posix()

    def _unknown(self, text: str, name: str, lock: Lock | None) -> str:
        stage_runs = list(lock.stages.values()) if lock else self.run_index.stage_runs
        where = f"in {LOCK_FILE} of {lock.name[:7]}" if lock else "in the records of this clone"
        if not stage_runs:
            return f"{text}: there are no records {where}; run the pipeline, or `git fetch` results"
        folder = f"{self._relative(name)}/"
        paths = sorted({path for stage_run in stage_runs for path in stage_run.outs})
        inside = [path for path in paths if path.startswith(folder)]
        if inside:
            return f"{text}: a folder with several artifacts; name one of them:{_listed(inside)}"
        if _HEX.fullmatch(name.lower()):
            return (
                f"{text}: no artifact or MLflow run {where} has this hash or id; in a fresh clone, "
                "`git fetch` the branch with the results, or set MLFLOW_TRACKING_URI"
            )
        stages = {stage_run.stage for stage_run in stage_runs}
        names = sorted({*stages, *paths, *map(short_name, paths)})
        close = difflib.get_close_matches(name, names, n=_MOST, cutoff=0.45)
        hint = "did you mean" if close else "some of the known names are"
        return f"{text}: nothing {where} has this name; {hint}{_listed(close or names)}"


def name_of(stage_run: StageRun) -> str:
    """A name that `find` understands, of this stage run and of no later one of its stage."""
    if stage_run.in_workspace:
        return stage_run.stage
    if stage_run.commits:
        return f"{stage_run.commits[-1][:12]}:{stage_run.stage}"
    return next(iter(stage_run.outs.values()), stage_run.stage)


def _listed(items: Iterable[str]) -> str:
    return "".join(f"\n  {item}" for item in islice(items, _MOST))


def _touches(artifact: str, path: str) -> bool:
    return artifact == path or path.startswith(f"{artifact}/") or artifact.startswith(f"{path}/")


def _by_stage(name: str, stage_runs: list[StageRun]) -> Match | None:
    return next(((None, item) for item in stage_runs if item.stage == name), None)


def _by_path(paths: list[str], stage_runs: list[StageRun]) -> Match | None:
    """An output, something inside one, or given data, by the first path that is known."""
    for path in paths:
        around = [path, *(str(folder) for folder in PurePosixPath(path).parents)][:-1]
        for part, candidate, stage_run in product(("outs", "inputs"), around, stage_runs):
            digest = getattr(stage_run, part).get(candidate)
            if digest is not None:
                return Artifact(candidate, digest), stage_run if part == "outs" else None
    return None


def _by_run(name: str, stage_runs: list[StageRun]) -> Match | None:
    jobs = ((stage_run, job) for stage_run in stage_runs for job in stage_run.jobs)
    return next(((None, stage_run) for stage_run, job in jobs if job.mlflow_run == name), None)


def _by_hash(text: str, digest: str, stage_runs: list[StageRun]) -> Match | None:
    known: dict[Artifact, StageRun | None] = {}
    for stage_run in stage_runs:
        known |= dict.fromkeys(starmap(Artifact, stage_run.inputs.items()))
    for stage_run in reversed(stage_runs):
        known |= dict.fromkeys(starmap(Artifact, stage_run.outs.items()), stage_run)
    matches = [item for item in known if item.hash.startswith(digest)]
    if len(matches) > 1:
        more = f"\n  and {len(matches) - _MOST} more" if len(matches) > _MOST else ""
        raise LockstepError(
            f"{text}: {len(matches)} artifacts have a hash with this prefix; give more of it, "
            f"or a path:{_listed(f'{item.hash}  {item.path}' for item in matches)}{more}"
        )
    return next(((item, known[item]) for item in matches), None)


def _by_code(text: str, digest: str, stage_runs: list[StageRun]) -> Match | None:
    """The stage that ran with this version of its code."""
    known = [item for item in stage_runs if (item.code_version or "").startswith(digest)]
    stages = sorted({stage_run.stage for stage_run in known})
    if len(stages) > 1:
        raise LockstepError(
            f"{text}: {len(stages)} stages have this code version; name one of them:"
            + _listed(stages)
        )
    return (None, known[0]) if known else None
