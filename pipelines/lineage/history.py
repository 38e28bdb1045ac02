"""The git history, as far as dvc.lock is in it: every commit of every ref, experiments included.

`dvc exp run` keeps its commits under refs/exps, which `--all` covers. Whatever the length of the
history, git is started three times: to list the commits, to name the blobs, to read them.
"""

import io
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

LOCK_FILE = "dvc.lock"


@dataclass(frozen=True)
class Commit:
    """A commit that changed dvc.lock."""

    sha: str
    time: float
    subject: str


@dataclass(frozen=True)
class History:
    """Git in one clone. Where git or the repository is missing, there is no history."""

    root: Path

    def commits(self) -> list[Commit]:
        """Every commit that changed dvc.lock, newest first."""
        lines = self._git(
            "log", "--all", "--full-history", "--date-order", "--format=%H%x00%ct%x00%s",
            "--", LOCK_FILE,
        )  # fmt: skip
        rows = [line.split("\0", 2) for line in (lines or "").split("\n") if line]
        return [Commit(sha, float(time), subject) for sha, time, subject in rows]

    def lock_blobs(self, commits: Iterable[str]) -> dict[str, str]:
        """The blob of dvc.lock in each commit that has one."""
        prefix = (self._git("rev-parse", "--show-prefix") or "").strip()
        wanted = list(commits)
        names = (f"{commit}:{prefix}{LOCK_FILE}" for commit in wanted)
        with self._cat_file("--batch-check=%(objectname) %(objecttype)", names) as answers:
            lines = answers.read().decode().splitlines()
        pairs = zip(wanted, (line.split(" ") for line in lines), strict=False)
        return {commit: fields[0] for commit, fields in pairs if fields[1:] == ["blob"]}

    def contents(self, blobs: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Each blob and its text."""
        with self._cat_file("--batch", blobs) as answers:
            while head := answers.readline():
                blob, _, size = head.decode().rstrip("\n").partition(" ")
                if not size.startswith("blob "):
                    continue
                yield blob, answers.read(int(size.split(" ")[1])).decode(errors="replace")
                answers.read(1)

    def resolve(self, revision: str) -> str | None:
        """The commit behind a revision, or behind the name of a DVC experiment."""
        if not revision or revision.startswith("-"):
            return None
        commit = self._git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
        if commit is None:
            refs = (self._git("for-each-ref", "--format=%(refname)", "refs/exps") or "").split()
            named = [ref for ref in refs if ref.rsplit("/", 1)[-1] == revision]
            if named:
                commit = self._git("rev-parse", "--verify", "--quiet", f"{named[-1]}^{{commit}}")
        return commit.strip() if commit else None

    def file(self, commit: str, path: str) -> str | None:
        """The content of a file in a commit; None where the commit has no such file."""
        return self._git("show", f"{commit}:{path}")

    def has(self, commit: str) -> bool:
        return self._git("cat-file", "-e", f"{commit}^{{commit}}") is not None

    def changes(self, one: str, other: str, files: Iterable[str], most: int = 10) -> list[str]:
        """The commits that changed these files between two commits, newest first, one per line."""
        if not (self.has(one) and self.has(other)):
            return []
        lines = self._git(
            "log", f"--max-count={most}", "--format=%h %s", f"{one}...{other}", "--", *files
        )
        return (lines or "").splitlines()

    def _git(self, *arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=self.root, capture_output=True, check=False
            )
        except FileNotFoundError:
            return None
        return done.stdout.decode(errors="replace") if done.returncode == 0 else None

    @contextmanager
    def _cat_file(self, form: str, names: Iterable[str]) -> Iterator[IO[bytes]]:
        """Git's answers about objects, while they come."""
        with tempfile.TemporaryFile() as questions:
            questions.write("".join(f"{name}\n" for name in names).encode())
            questions.seek(0)
            try:
                process = subprocess.Popen(
                    ["git", "cat-file", form],
                    cwd=self.root,
                    stdin=questions,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            except FileNotFoundError:
                yield io.BytesIO()
                return
            with process:
                assert process.stdout is not None
                yield process.stdout
