"""Which policy is meant, and where its files are.

    iter_002         a policy that dvc.lock of the workspace has
    REV:iter_002     one of a commit, a tag or a DVC experiment

Only what DVC recorded counts. The files may be in the workspace, in DVC's cache or in the ledger.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.identity.spec import Artifact
from pipelines.lineage.content import Content
from pipelines.lineage.history import resolve
from pipelines.lineage.run_index import RunIndex, gather
from pipelines.lineage.stage_run import Lock
from pipelines.lineage.target import Resolver

_POLICIES = PurePosixPath("artifacts/policies")


@dataclass(frozen=True)
class Policy:
    """A finished policy and its files."""

    name: str
    """As the user wrote it."""
    artifact: Artifact
    commit: str | None
    """None: the workspace."""
    files: Mapping[str, Path]
    """By their names in its folder."""


def find_policy(repository: Repository, name: str) -> Policy:
    """The policy of a name; LockstepError where there is none, or its files are gone."""
    name = name.strip()
    run_index = gather(repository)
    lock, commit, policy = run_index.workspace, None, name
    if ":" in name:
        lock, policy = Resolver(run_index, repository.root).revision(name)
        commit = resolve(repository.root, name.partition(":")[0])
    if lock is None:
        raise LockstepError(f"{name}: nothing is recorded in the workspace: `lockstep run` first")
    known = _policies(lock)
    if policy not in known:
        there = ", ".join(known) or "none"
        where = f"at {commit[:7]}" if commit else "in dvc.lock of the workspace"
        raise LockstepError(
            f"{name!r} is no finished policy: {where} there are {there}; REV:NAME names one of a "
            "commit, a tag or a DVC experiment"
        )
    files = Content(repository, run_index).files(known[policy])
    return Policy(name, known[policy], commit, files)


def finished_policies(run_index: RunIndex) -> list[str]:
    """Those of the workspace, in the order of their training."""
    return list(_policies(run_index.workspace)) if run_index.workspace else []


def _policies(lock: Lock) -> dict[str, Artifact]:
    """Every policy that was finished, by name; the SFT policy first."""
    found = {
        PurePosixPath(path).parent.name: Artifact(path, digest)
        for stage_run in lock.stages.values()
        for path, digest in stage_run.outs.items()
        if PurePosixPath(path).parent.parent == _POLICIES and PurePosixPath(path).name == "model"
    }
    return dict(sorted(found.items(), key=lambda item: (item[0] != "sft", item[0])))
