"""Paths: the clone, and the folder `.lockstep` in it that holds all local state."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from pipelines.base.errors import LockstepError


@dataclass(frozen=True)
class Repository:
    """One clone. Everything that is not versioned is under `.lockstep`."""

    root: Path

    @classmethod
    def find(cls, start: Path | None = None) -> "Repository":
        """The clone around the current folder."""
        here = (start or Path.cwd()).resolve()
        for folder in (here, *here.parents):
            if (folder / "dvc.yaml").is_file() and (folder / "params.yaml").is_file():
                return cls(folder)
        raise LockstepError(
            f"{here}: no dvc.yaml and params.yaml here or above; run lockstep inside a repository"
        )

    @property
    def home(self) -> Path:
        return self.root / ".lockstep"

    @property
    def jobs(self) -> Path:
        return self.home / "jobs"

    @property
    def shared_home(self) -> Path:
        """State that outlives a clone: `dvc exp run --temp` works in one inside `.dvc/tmp`."""
        parts = self.root.parts
        for index in range(len(parts) - 2):
            if parts[index : index + 2] == (".dvc", "tmp"):
                return Path(*parts[:index]) / ".lockstep"
        return self.home

    def git_commit(self) -> str | None:
        """The commit checked out, followed by `+` where tracked files differ from it."""
        head = self.git("rev-parse", "HEAD")
        if head is None:
            return None
        return head + ("+" if self.git("status", "--porcelain", "--untracked-files=no") else "")

    def git(self, *arguments: str) -> str | None:
        """What a git command prints; None if it fails."""
        done = subprocess.run(
            ["git", *arguments],
            cwd=self.root,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        return done.stdout.strip() if done.returncode == 0 else None
