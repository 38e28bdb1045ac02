"""From what a user types to what is meant.

A revision narrows the search to its dvc.lock. Without one the workspace's dvc.lock counts first,
then the ledger, newest job first, then the history, newest commit first: the order in which the
evidence lists its makings. A name that means nothing, or two things, is an error that says what
would have meant something.
"""

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.lineage.evidence import Artifact, Evidence
from pipelines.lineage.history import LOCK_FILE, History
from pipelines.lineage.making import Lock, Making, short_hash
from pipelines.lineage.naming import paths_called, short_name

SHORTEST_PREFIX = 6
PROMPT = "prompt:"
_HEX = re.compile(r"[0-9a-f]{6,64}(\.dir)?")
_MOST = 8


@dataclass(frozen=True)
class Target:
    """What is asked about: an artifact, or all that one making left."""

    text: str
    artifact: Artifact | None
    making: Making | None
    """None where nothing here made it: data that were given."""
    lock: Lock | None
    """Where it was found, if in a dvc.lock."""

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.text,
            "path": self.artifact.path if self.artifact else None,
            "hash": self.artifact.hash if self.artifact else None,
            "stage": self.making.stage if self.making else None,
        }

    @property
    def title(self) -> str:
        if self.artifact is not None:
            return short_name(self.artifact.path)
        assert self.making is not None
        return self.making.stage


@dataclass(frozen=True)
class Resolver:
    """Finds targets in the evidence of one clone."""

    evidence: Evidence
    root: Path
    history: History

    def revision(self, text: str) -> tuple[Lock | None, str]:
        """Take a revision off the front of a name: the lock it means, and the rest."""
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
        """The lock that a commit has, which an earlier commit may have brought."""
        if commit in self.evidence.locks:
            return self.evidence.locks[commit]
        known = self.history.lock_blobs([commit, *self.evidence.locks])
        return next(
            (
                lock
                for sha, lock in self.evidence.locks.items()
                if commit in known and known.get(sha) == known[commit]
            ),
            None,
        )

    def find(self, text: str) -> Target:
        """What a name means; LockstepError lists what is near where it means nothing."""
        lock, name = self.revision(text)
        name = name.strip()
        if name.startswith(PROMPT):
            raise LockstepError(f"{text}: a prompt is not an artifact; ask about it alone")
        makings = list(lock.stages.values()) if lock else self.evidence.makings
        target = (
            self._by_stage(text, name, makings, lock)
            or self._by_path(text, self._relative(name), makings, lock)
            or self._by_short_name(text, name, makings, lock)
            or self._by_run(text, name, makings, lock)
            or self._by_hash(text, name, makings, lock)
            or self._by_code(text, name, makings, lock)
        )
        if target is None:
            raise LockstepError(self._unknown(text, name, lock))
        return target

    def _by_stage(
        self, text: str, name: str, makings: list[Making], lock: Lock | None
    ) -> Target | None:
        found = next((making for making in makings if making.stage == name), None)
        return Target(text, None, found, lock or self._lock_of(found)) if found else None

    def _by_path(
        self, text: str, path: str, makings: list[Making], lock: Lock | None
    ) -> Target | None:
        """An output, something inside one, or data that were given."""
        around = [path, *(str(folder) for folder in PurePosixPath(path).parents)][:-1]
        for part in "outs", "inputs":
            for candidate in around:
                for making in makings:
                    digest = getattr(making, part).get(candidate)
                    if digest is not None:
                        artifact = Artifact(candidate, digest)
                        maker = making if part == "outs" else None
                        return self._target(text, artifact, maker, lock)
        return None

    def _by_short_name(
        self, text: str, name: str, makings: list[Making], lock: Lock | None
    ) -> Target | None:
        for path in paths_called(name):
            if target := self._by_path(text, path, makings, lock):
                return target
        return None

    def _by_run(
        self, text: str, name: str, makings: list[Making], lock: Lock | None
    ) -> Target | None:
        for making in makings:
            if any(job.run_id == name for job in making.jobs):
                return Target(text, None, making, lock or self._lock_of(making))
        return None

    def _by_hash(
        self, text: str, name: str, makings: list[Making], lock: Lock | None
    ) -> Target | None:
        digest = name.lower()
        if not _HEX.fullmatch(digest):
            return None
        made = {
            Artifact(p, h): making for making in reversed(makings) for p, h in making.outs.items()
        }
        read = {Artifact(p, h): None for making in makings for p, h in making.inputs.items()}
        known: dict[Artifact, Making | None] = {**read, **made}
        found = [item for item in known if item.hash.startswith(digest)]
        if not found:
            return None
        paths = {item.path for item in found}
        if len(found) > 1 and (len({item.hash for item in found}) > 1 or len(paths) > 1):
            listed = "".join(f"\n  {item.hash}  {item.path}" for item in found[:_MOST])
            more = f"\n  and {len(found) - _MOST} more" if len(found) > _MOST else ""
            raise LockstepError(
                f"{text}: {len(found)} artifacts have a hash that begins so; give more of it, or "
                f"a path:{listed}{more}"
            )
        return self._target(text, found[0], known[found[0]], lock)

    def _by_code(
        self, text: str, name: str, makings: list[Making], lock: Lock | None
    ) -> Target | None:
        """The stage that ran with this version of its code."""
        digest = name.lower()
        if not _HEX.fullmatch(digest):
            return None
        known = [making for making in makings if (making.code_version or "").startswith(digest)]
        found = {making.stage: making for making in reversed(known)}
        if len(found) > 1:
            listed = "".join(f"\n  {stage}" for stage in sorted(found)[:_MOST])
            raise LockstepError(
                f"{text}: the version of the code of {len(found)} stages; name one of them:{listed}"
            )
        for making in found.values():
            return Target(text, None, making, lock or self._lock_of(making))
        return None

    def _target(
        self, text: str, artifact: Artifact, maker: Making | None, lock: Lock | None
    ) -> Target:
        if maker is None:
            maker = next(iter(self.evidence.makers(artifact, lock)), None)
        return Target(text, artifact, maker, lock or self._lock_of(maker))

    def _lock_of(self, making: Making | None) -> Lock | None:
        return self.evidence.lock_of(making) if making else None

    def _relative(self, name: str) -> str:
        """A path as dvc.lock spells it: from the repository's root, without a slash at the end."""
        here = Path(os.path.normpath(Path.cwd() / name))
        for path in (here, Path(os.path.normpath(self.root / name))):
            if path.is_relative_to(self.root):
                relative = path.relative_to(self.root).as_posix()
                if any(_touches(artifact.path, relative) for artifact in self.evidence.artifacts()):
                    return relative
        return PurePosixPath(name).as_posix()

    def _unknown(self, text: str, name: str, lock: Lock | None) -> str:
        makings = list(lock.stages.values()) if lock else self.evidence.makings
        where = f"in {LOCK_FILE} of {lock.name[:7]}" if lock else "in the records of this clone"
        if not makings:
            return f"{text}: nothing is known yet {where}; run the pipeline, or `git fetch` results"
        path = self._relative(name)
        inside = sorted({p for making in makings for p in making.outs if p.startswith(f"{path}/")})
        if inside:
            listed = "".join(f"\n  {item}" for item in inside[:_MOST])
            return f"{text}: a folder with several artifacts; name one of them:{listed}"
        if _HEX.fullmatch(name.lower()):
            return (
                f"{text}: no artifact or MLflow run {where} has this hash or id; in a fresh clone, "
                "`git fetch` the branch with the results, or set MLFLOW_TRACKING_URI"
            )
        names = sorted(
            {making.stage for making in makings}
            | {short_name(path) for making in makings for path in making.outs}
            | {path for making in makings for path in making.outs}
        )
        close = difflib.get_close_matches(name, names, n=_MOST, cutoff=0.45)
        hint = "did you mean" if close else "there are, among others,"
        listed = "".join(f"\n  {item}" for item in close or names[:_MOST])
        return f"{text}: nothing {where} is called so; {hint}{listed}"


def _touches(artifact: str, path: str) -> bool:
    return artifact == path or path.startswith(f"{artifact}/") or artifact.startswith(f"{path}/")


def describe(artifact: Artifact) -> str:
    return f"{short_name(artifact.path)} {short_hash(artifact.hash)}"
