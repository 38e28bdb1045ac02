"""Results that one pushes and another pulls: the same bytes, and nothing left to compute."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.conftest import contents, stale

pytestmark = pytest.mark.slow


def is_settled(clone: Any) -> None:
    """Every tool says that there is nothing to do, and does nothing."""
    assert stale(clone) == set()
    repro = clone.run("dvc", "repro").stdout
    assert "up to date" in repro
    assert "Running stage" not in repro
    assert "nothing to do" in clone.run("lockstep", "run").stdout
    assert "all as recorded" in clone.run("lockstep", "verify").stdout
    assert clone.run("git", "status", "--porcelain").stdout == ""
    assert not list(clone.root.glob(".lockstep/jobs/*/*"))


def test_a_colleague_pulls_what_was_pushed_and_computes_nothing(
    finished: Any, tmp_path: Path
) -> None:
    finished.without_tracking()
    made = finished.run("git", "show", "--name-only", "--format=", "HEAD").stdout.split()
    assert {path.split("/")[0] for path in made} == {"dvc.lock", "metrics"}  # as the README says
    finished.run("dvc", "remote", "add", "--default", "store", str(tmp_path / "store"))
    finished.run("git", "add", ".dvc/config", "dvc.lock", "metrics", "params.yaml")
    finished.run("git", "commit", "-qm", "results")
    finished.run("dvc", "push", "--run-cache")
    finished.run("git", "clone", "-q", str(finished.root), str(tmp_path / "colleague"))
    colleague = type(finished)(tmp_path / "colleague")
    colleague.without_tracking()
    colleague.run("dvc", "pull", "--run-cache")
    assert contents(colleague) == contents(finished)
    is_settled(colleague)

    # Artifacts and cache lost, run-cache kept.
    shutil.rmtree(colleague.root / "artifacts")
    shutil.rmtree(colleague.root / ".dvc/cache/files")
    assert "in neither the workspace nor" in colleague.run("lockstep", "verify", check=False).stdout
    colleague.run("dvc", "pull")
    assert contents(colleague) == contents(finished)


def test_what_garbage_collection_removes_can_be_pulled_again(finished: Any, tmp_path: Path) -> None:
    finished.without_tracking()
    finished.run("dvc", "remote", "add", "--default", "store", str(tmp_path / "store"))
    finished.run("dvc", "push")
    before = contents(finished)
    finished.set_params(report__samples=1)
    finished.run("dvc", "repro", "report")
    finished.run("dvc", "gc", "--workspace", "--force")
    finished.run("git", "checkout", "--", "params.yaml", "dvc.lock", "metrics")
    lost = finished.run("lockstep", "verify", "report", check=False)
    assert lost.returncode == 1
    finished.run("dvc", "pull", "--force", "report")
    assert contents(finished) == before
    assert "all as recorded" in finished.run("lockstep", "verify").stdout
    assert "up to date" in finished.run("dvc", "status").stdout
