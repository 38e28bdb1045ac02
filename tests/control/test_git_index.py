"""DVC refuses an output that git tracks; asked by a forked DVC, git's index is read once."""

import subprocess
from pathlib import Path

import pytest
from scmrepo.git.backend.dulwich import DulwichBackend

from pipelines.warm.git_index import read_index_once


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DulwichBackend:
    """Of a repository with `a/b/c`, `ab` and an untracked `d`, after the replacement."""
    monkeypatch.setattr(DulwichBackend, "is_tracked", DulwichBackend.is_tracked)
    read_index_once()
    (tmp_path / "a/b").mkdir(parents=True)
    for name in ("a/b/c", "ab", "d"):
        (tmp_path / name).write_text(name)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "a/b/c", "ab")
    return DulwichBackend(str(tmp_path))


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=folder, check=True)


def tracked(backend: DulwichBackend, *names: str) -> list[str]:
    return [name for name in names if backend.is_tracked(str(Path(backend.root_dir) / name))]


def test_files_and_the_folders_that_have_some_are_tracked(backend: DulwichBackend) -> None:
    names = ("a", "a/b", "a/b/c", "ab", "a/b/c/x", "a/", "b", "c", "d", "a/bc")
    assert tracked(backend, *names) == ["a", "a/b", "a/b/c", "ab", "a/"]


def test_what_git_is_told_between_two_looks_is_seen(backend: DulwichBackend) -> None:
    root = Path(backend.root_dir)
    assert tracked(backend, "ab", "d") == ["ab"]
    git(root, "add", "d")
    assert tracked(backend, "ab", "d") == ["ab", "d"]
    git(root, "rm", "-q", "--cached", "ab")
    assert tracked(backend, "ab", "d") == ["d"]


def test_without_an_index_nothing_is_tracked(backend: DulwichBackend) -> None:
    (Path(backend.root_dir) / ".git/index").unlink()
    assert tracked(backend, "ab") == []


def test_repositories_are_told_apart(backend: DulwichBackend, tmp_path: Path) -> None:
    assert tracked(backend, "ab") == ["ab"]
    other = tmp_path / "a/other"
    other.mkdir()
    git(other, "init", "-q")
    (other / "d").write_text("d")
    git(other, "add", "d")
    assert tracked(DulwichBackend(str(other)), "ab", "d") == ["d"]
