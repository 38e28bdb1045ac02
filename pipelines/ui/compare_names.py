"""What can be compared: the names that exist, for a form to offer.

Only what `lockstep compare` would find: policies that were evaluated in the workspace, and the
experiments, tags and newest commits whose dvc.lock has an evaluation.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from pipelines.base.git import git
from pipelines.base.repository import Repository
from pipelines.lineage.history import lock_blobs
from pipelines.lineage.run_index import WORKSPACE, RunIndex, gather
from pipelines.lineage.stage_run import Lock
from pipelines.results.sides import evaluations
from stages.contracts.family import ROOT

MOST_COMMITS = 30
SHORT = 10
"""Characters of a commit that name it."""
_FORMAT = "%(refname)%09%(objectname)%09%(*objectname)"
_EXPERIMENT = re.compile(r"refs/exps/[^/]+/[^/]+/(?P<name>[^/]+)")
_TAG = re.compile(r"refs/tags/(?P<name>.+)")


@dataclass(frozen=True)
class Revision:
    name: str
    """How `lockstep compare` finds it."""
    kind: str
    """workspace, experiment, tag or commit."""
    commit: str | None
    subject: str
    """Of the commit."""
    policies: tuple[str, ...]
    """Those that were evaluated there."""


def revisions(repository: Repository) -> list[Revision]:
    """The workspace first, then experiments and tags, and the commits that changed dvc.lock."""
    root, run_index = repository.root, gather(repository)
    experiments, tags = _named(root, "refs/exps", _EXPERIMENT), _named(root, "refs/tags", _TAG)
    commits = [sha for sha in run_index.locks if sha not in experiments.values()][:MOST_COMMITS]
    asked = [
        *(("experiment", name, sha) for name, sha in experiments.items()),
        *(("tag", name, sha) for name, sha in tags.items()),
        *(("commit", sha[:SHORT], sha) for sha in commits),
    ]
    locks = _locks(root, run_index, {sha for _, _, sha in asked})
    subjects = _subjects(root, {sha for _, _, sha in asked})
    here = run_index.workspace
    found = [Revision(WORKSPACE, WORKSPACE, None, "", _policies(here))] if here else []
    for kind, name, sha in asked:
        if lock := locks.get(sha):
            found.append(Revision(name, kind, sha, subjects.get(sha, ""), _policies(lock)))
    return [revision for revision in found if revision.policies]


def _named(root: Path, refs: str, pattern: re.Pattern[str]) -> dict[str, str]:
    """The commits of named revisions, newest first."""
    lines = git(root, "for-each-ref", "--sort=-creatordate", f"--format={_FORMAT}", refs) or ""
    found: dict[str, str] = {}
    for line in lines.splitlines():
        ref, own, of_tag = line.split("\t")
        if named := pattern.fullmatch(ref):
            found.setdefault(named["name"], of_tag or own)
    return found


def _locks(root: Path, run_index: RunIndex, commits: set[str]) -> dict[str, Lock]:
    """The dvc.lock of each commit, which an earlier one may have introduced."""
    blobs = lock_blobs(root, [*run_index.locks, *sorted(commits - run_index.locks.keys())])
    by_blob = {blobs[sha]: lock for sha, lock in run_index.locks.items() if sha in blobs}
    return {sha: by_blob[blob] for sha, blob in blobs.items() if blob in by_blob}


def _subjects(root: Path, commits: set[str]) -> dict[str, str]:
    if not commits:
        return {}
    lines = git(root, "log", "--no-walk", "--format=%H%x09%s", *sorted(commits)) or ""
    return dict(line.split("\t", 1) for line in lines.splitlines())


def _policies(lock: Lock) -> tuple[str, ...]:
    """Those that were evaluated, the SFT policy first."""
    return tuple(sorted(evaluations(lock), key=lambda policy: (policy != ROOT, policy)))
