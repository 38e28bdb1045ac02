"""The git history, as far as dvc.lock is in it: every commit of every ref, experiments included.

`dvc exp run` keeps its commits under refs/exps, which `--all` covers. Whatever the length of the
history, git is started three times: to list the commits, to name the blobs, to read them. Where git
or the repository is missing, there is no history.
"""

from collections.abc import Iterable
from pathlib import Path

from pipelines.base.git import cat_file, git

LOCK_FILE = "dvc.lock"
_MOST_CHANGES = 10


def lock_commits(root: Path) -> dict[str, float]:
    """Every commit that changed dvc.lock, newest first, with its time."""
    lines = git(
        root, "log", "--all", "--full-history", "--date-order", "--format=%H %ct", "--", LOCK_FILE
    )
    rows = (line.split() for line in (lines or "").splitlines())
    return {sha: float(time) for sha, time in rows}


def lock_blobs(root: Path, commits: Iterable[str]) -> dict[str, str]:
    """The blob of dvc.lock in each commit that has one."""
    prefix = (git(root, "rev-parse", "--show-prefix") or "").strip()
    wanted = list(commits)
    names = (f"{commit}:{prefix}{LOCK_FILE}" for commit in wanted)
    with cat_file(root, "--batch-check=%(objectname) %(objecttype)", names) as answers:
        lines = answers.read().decode().splitlines()
    pairs = zip(wanted, (line.split(" ") for line in lines), strict=False)
    return {commit: fields[0] for commit, fields in pairs if fields[1:] == ["blob"]}


def resolve(root: Path, revision: str) -> str | None:
    """The commit behind a revision, or behind the name of a DVC experiment."""
    if not revision or revision.startswith("-"):
        return None
    refs = (git(root, "for-each-ref", "--format=%(refname)", "refs/exps") or "").split()
    experiments = [ref for ref in refs if ref.rsplit("/", 1)[-1] == revision]
    for name in (revision, *experiments[-1:]):
        if commit := git(root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"):
            return commit.strip()
    return None


def file_at(root: Path, commit: str, path: str) -> str | None:
    """The content of a file in a commit; None where the commit has no such file."""
    return git(root, "show", f"{commit}:{path}")


def commits_between(root: Path, one: str, other: str, files: Iterable[str]) -> list[str]:
    """The commits that changed these files between two commits, newest first, one per line."""
    span = (f"--max-count={_MOST_CHANGES}", "--format=%h %s", f"{one}...{other}")
    return (git(root, "log", *span, "--", *files) or "").splitlines()
