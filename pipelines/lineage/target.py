"""Resolves the name that a user types to an artifact or a stage run.

A revision limits the search to its dvc.lock. Without one, the workspace's dvc.lock comes first,
then the ledger, newest job first, then the git history, newest commit first: the order in which the
index lists its stage runs. For an unknown or ambiguous name the error lists valid names.
"""

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.lineage.history import LOCK_FILE, History
from pipelines.lineage.naming import paths_called, short_name
from pipelines.lineage.run_index import Artifact, RunIndex
from pipelines.lineage.stage_run import Lock, StageRun, short_hash

SHORTEST_PREFIX = 6
PROMPT = "prompt:"
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
    history: History

    def revision(self, text: str) -> tuple[Lock | None, str]:
        """Split a revision off a name: its lock, and the rest."""
        before, colon, rest = text.partition(":")
        if not colon or before == PROMPT.rstrip(":"):
            return None, text
        commit = self.history.resolve(before)
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
        known = self.history.lock_blobs([commit, *self.run_index.locks])
        return next(
            (
                lock
                for sha, lock in self.run_index.locks.items()
                if commit in known and known.get(sha) == known[commit]
            ),
            None,
        )

    def find(self, text: str) -> Target:
        """The target of a name; for an unknown one, LockstepError lists similar names."""
        lock, name = self.revision(text)
        name = name.strip()
        if name.startswith(PROMPT):
            raise LockstepError(f"{text}: a prompt is not an artifact; ask about it alone")
        stage_runs = list(lock.stages.values()) if lock else self.run_index.stage_runs
        target = (
            self._by_stage(text, name, stage_runs, lock)
            or self._by_path(text, self._relative(name), stage_runs, lock)
            or self._by_short_name(text, name, stage_runs, lock)
            or self._by_run(text, name, stage_runs, lock)
            or self._by_hash(text, name, stage_runs, lock)
            or self._by_code(text, name, stage_runs, lock)
        )
        if target is None:
            raise LockstepError(self._unknown(text, name, lock))
        return target

    def _by_stage(
        self, text: str, name: str, stage_runs: list[StageRun], lock: Lock | None
    ) -> Target | None:
        match = next((stage_run for stage_run in stage_runs if stage_run.stage == name), None)
        return Target(text, None, match, lock or self._lock_of(match)) if match else None

    def _by_path(
        self, text: str, path: str, stage_runs: list[StageRun], lock: Lock | None
    ) -> Target | None:
        """An output, something inside one, or given data."""
        around = [path, *(str(folder) for folder in PurePosixPath(path).parents)][:-1]
        for part in "outs", "inputs":
            for candidate in around:
                for stage_run in stage_runs:
                    digest = getattr(stage_run, part).get(candidate)
                    if digest is not None:
                        artifact = Artifact(candidate, digest)
                        maker = stage_run if part == "outs" else None
                        return self._target(text, artifact, maker, lock)
        return None

    def _by_short_name(
        self, text: str, name: str, stage_runs: list[StageRun], lock: Lock | None
    ) -> Target | None:
        for path in paths_called(name):
            if target := self._by_path(text, path, stage_runs, lock):
                return target
        return None

    def _by_run(
        self, text: str, name: str, stage_runs: list[StageRun], lock: Lock | None
    ) -> Target | None:
        for stage_run in stage_runs:
            if any(job.run_id == name for job in stage_run.jobs):
                return Target(text, None, stage_run, lock or self._lock_of(stage_run))
        return None

    def _by_hash(
        self, text: str, name: str, stage_runs: list[StageRun], lock: Lock | None
    ) -> Target | None:
        digest = name.lower()
        if not _HEX.fullmatch(digest):
            return None
        made = {
            Artifact(p, h): stage_run
            for stage_run in reversed(stage_runs)
            for p, h in stage_run.outs.items()
        }
        read = {
            Artifact(p, h): None for stage_run in stage_runs for p, h in stage_run.inputs.items()
        }
        known: dict[Artifact, StageRun | None] = {**read, **made}
        matches = [item for item in known if item.hash.startswith(digest)]
        if not matches:
            return None
        paths = {item.path for item in matches}
        if len(matches) > 1 and (len({item.hash for item in matches}) > 1 or len(paths) > 1):
            listed = "".join(f"\n  {item.hash}  {item.path}" for item in matches[:_MOST])
            more = f"\n  and {len(matches) - _MOST} more" if len(matches) > _MOST else ""
            raise LockstepError(
                f"{text}: {len(matches)} artifacts have a hash with this prefix; give more of it, "
                f"or a path:{listed}{more}"
            )
        return self._target(text, matches[0], known[matches[0]], lock)

    def _by_code(
        self, text: str, name: str, stage_runs: list[StageRun], lock: Lock | None
    ) -> Target | None:
        """The stage that ran with this version of its code."""
        digest = name.lower()
        if not _HEX.fullmatch(digest):
            return None
        known = [
            stage_run
            for stage_run in stage_runs
            if (stage_run.code_version or "").startswith(digest)
        ]
        by_stage = {stage_run.stage: stage_run for stage_run in reversed(known)}
        if len(by_stage) > 1:
            listed = "".join(f"\n  {stage}" for stage in sorted(by_stage)[:_MOST])
            raise LockstepError(
                f"{text}: {len(by_stage)} stages have this code version; name one of them:{listed}"
            )
        for stage_run in by_stage.values():
            return Target(text, None, stage_run, lock or self._lock_of(stage_run))
        return None

    def _target(
        self, text: str, artifact: Artifact, maker: StageRun | None, lock: Lock | None
    ) -> Target:
        if maker is None:
            maker = next(iter(self.run_index.makers(artifact, lock)), None)
        return Target(text, artifact, maker, lock or self._lock_of(maker))

    def _lock_of(self, stage_run: StageRun | None) -> Lock | None:
        return self.run_index.lock_of(stage_run) if stage_run else None

    def _relative(self, name: str) -> str:
        """A path as dvc.lock has it: relative to the repository's root, no trailing slash."""
        here = Path(os.path.normpath(Path.cwd() / name))
        for path in (here, Path(os.path.normpath(self.root / name))):
            if path.is_relative_to(self.root):
                relative = path.relative_to(self.root).as_posix()
                if any(
                    _touches(artifact.path, relative) for artifact in self.run_index.artifacts()
                ):
                    return relative
        return PurePosixPath(name).as_posix()

    def _unknown(self, text: str, name: str, lock: Lock | None) -> str:
        stage_runs = list(lock.stages.values()) if lock else self.run_index.stage_runs
        where = f"in {LOCK_FILE} of {lock.name[:7]}" if lock else "in the records of this clone"
        if not stage_runs:
            return f"{text}: there are no records {where}; run the pipeline, or `git fetch` results"
        path = self._relative(name)
        inside = sorted(
            {p for stage_run in stage_runs for p in stage_run.outs if p.startswith(f"{path}/")}
        )
        if inside:
            listed = "".join(f"\n  {item}" for item in inside[:_MOST])
            return f"{text}: a folder with several artifacts; name one of them:{listed}"
        if _HEX.fullmatch(name.lower()):
            return (
                f"{text}: no artifact or MLflow run {where} has this hash or id; in a fresh clone, "
                "`git fetch` the branch with the results, or set MLFLOW_TRACKING_URI"
            )
        names = sorted(
            {stage_run.stage for stage_run in stage_runs}
            | {short_name(path) for stage_run in stage_runs for path in stage_run.outs}
            | {path for stage_run in stage_runs for path in stage_run.outs}
        )
        close = difflib.get_close_matches(name, names, n=_MOST, cutoff=0.45)
        hint = "did you mean" if close else "some of the known names are"
        listed = "".join(f"\n  {item}" for item in close or names[:_MOST])
        return f"{text}: nothing {where} has this name; {hint}{listed}"


def _touches(artifact: str, path: str) -> bool:
    return artifact == path or path.startswith(f"{artifact}/") or artifact.startswith(f"{path}/")


def describe(artifact: Artifact) -> str:
    return f"{short_name(artifact.path)} {short_hash(artifact.hash)}"
