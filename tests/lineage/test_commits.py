"""The history is that of every ref: what was recorded once is known, wherever it was recorded."""

from pathlib import Path

from pipelines.lineage.history import lock_commits, resolve
from tests.lineage.world import git


def test_what_a_dvc_experiment_recorded_is_part_of_the_history(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    made = {}
    for name in ("workspace", "experiment"):
        (tmp_path / "dvc.lock").write_text(f"# {name}\n")
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-qm", name)
        made[name] = git(tmp_path, "rev-parse", "HEAD")
    git(tmp_path, "update-ref", "refs/exps/ab/cd/brave-owl", made["experiment"])
    git(tmp_path, "reset", "-q", "--hard", made["workspace"])
    assert set(lock_commits(tmp_path)) == set(made.values())
    assert resolve(tmp_path, "brave-owl") == made["experiment"]
