"""Records that cannot be read: what is left answers, and each of them is named, not passed over."""

from pathlib import Path

import pytest

from pipelines.base.repository import Repository
from pipelines.ledger.entry import Ledger
from pipelines.lineage.run_index import gather
from tests.control.made_up import SPEC
from tests.ledger_values import ORIGIN
from tests.lineage.world import git

LOCK = """schema: '2.0'
stages:
  sft:
    cmd: python -m pipelines stage sft
    outs:
    - path: artifacts/model
      md5: {}
"""
TORN = "stages: ["


def commit(root: Path, lock: str) -> str:
    (root / "dvc.lock").write_text(lock)
    git(root, "add", ".")
    git(root, "commit", "-qm", "results")
    return git(root, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    git(tmp_path, "init", "-q")
    return Repository(tmp_path)


def test_a_commit_whose_lock_is_torn_is_named_beside_those_that_answer(
    repository: Repository,
) -> None:
    old = commit(repository.root, LOCK.format("a" * 32))
    torn = commit(repository.root, TORN)
    new = commit(repository.root, LOCK.format("b" * 32))
    found = gather(repository)
    assert list(found.locks) == [new, old]
    assert [note for note in found.notes if torn[:7] in note]
    assert len(found.notes) == 1


def test_a_workspace_whose_lock_is_torn_is_not_one_that_has_none(repository: Repository) -> None:
    commit(repository.root, LOCK.format("a" * 32))
    (repository.root / "dvc.lock").write_text(TORN)
    assert "dvc.lock is skipped" in " ".join(gather(repository).notes)
    (repository.root / "dvc.lock").unlink()
    assert "has no dvc.lock" in " ".join(gather(repository).notes)


@pytest.mark.parametrize("name", ["spec.json", "entry.json", "record.json"])
@pytest.mark.parametrize("text", ["", '{"outs": ', "[]"])
def test_a_file_of_a_job_that_is_torn_is_named_and_one_that_is_missing_is_not(
    repository: Repository, name: str, text: str
) -> None:
    commit(repository.root, LOCK.format("a" * 32))
    entry = Ledger(repository.jobs).find_or_create(SPEC, ORIGIN)
    assert gather(repository).notes == []
    (entry.folder / name).write_text(text)
    assert [note for note in gather(repository).notes if f"{entry.folder.name}/{name}" in note]
