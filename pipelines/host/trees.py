"""A clone's files as trees of git, without touching its index, its branches or its files.

A snapshot has what is tracked and what is untracked and not ignored, just as it lies there. File
names are bytes, whatever the locale.
"""

import os
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipelines.base import atomic
from pipelines.base.errors import LockstepError
from pipelines.host.reconcile import Entry, Files

BASE = "refs/lockstep/base"
"""There: the files that both clones had after the last command from here."""
UNDER_WAY = "refs/lockstep/under-way"
"""There: the files that a command is about to bring, or was when it was killed."""
WHOLE = "refs/lockstep/whole"
"""There: these, and what only that clone has."""
THERE = "refs/lockstep/there"
"""In both: the clone there, as it was seen last."""

AUTHOR = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "lockstep"), ("EMAIL", ""), ("DATE", "@0 +0000"))
}
"""The same files are the same commit."""

OWN_INDEX = "lockstep-index"
"""There: the index of the last snapshot, beside git's own."""


def snapshot_script(*begin_with: str) -> str:
    """Commands of sh, in a clone: its $tree, and the $index with it.

    The index is a copy of the first of these that there is: it knows which files are tracked, and
    which need not be read again.
    """
    copies = " || ".join(f'cp "$git/{name}" "$index" 2>/dev/null' for name in begin_with)
    return (
        'git=$(git rev-parse --absolute-git-dir) && index=$(mktemp "$git/lockstep-XXXXXX") || '
        f"""exit 2; trap 'rm -f "$index"' EXIT; {copies} || rm "$index"; """
        'export GIT_INDEX_FILE="$index"; git -c core.safecrlf=false add --all . && '
        "tree=$(git write-tree) || exit 2"
    )


LARGE = 100_000_000
"""The most bytes of an untracked file: git keeps a copy of each, on both sides."""


@dataclass(frozen=True)
class Tree:
    """A tree of git, and the files in it."""

    name: str
    files: Files


def snapshot(root: Path) -> str:
    """The tree of the files that lie here."""
    script = f'{snapshot_script("index")}; echo "$tree"'
    return _done(["sh", "-c", script], root, "read the files here").decode().strip()


def large_files(root: Path) -> list[str]:
    """Untracked files that are too large to go through git."""
    listed = git(root, "ls-files", "--others", "--exclude-standard", "-z").split(b"\0")
    found = []
    for name in map(os.fsdecode, filter(None, listed)):
        with suppress(OSError):
            if (root / name).lstat().st_size > LARGE:
                found.append(name)
    return found


def tree_of(root: Path, name: str) -> Tree:
    """Of a tree or commit; of no name, an empty one."""
    if not name:
        return Tree("", {})
    tree = git(root, "rev-parse", f"{name}^{{tree}}").decode().strip()
    files: dict[str, Entry] = {}
    for line in filter(None, git(root, "ls-tree", "-r", "-z", tree).split(b"\0")):
        what, _, path = line.partition(b"\t")
        mode, _, blob = what.decode().split(" ")
        files[os.fsdecode(path)] = (mode, blob)
    return Tree(tree, files)


def is_known(root: Path, name: str) -> bool:
    """Whether this clone has the object, and so all that belongs to it."""
    done = subprocess.run(
        ["git", "cat-file", "-e", name], cwd=root, capture_output=True, check=False
    )
    return not done.returncode


def write_tree(root: Path, files: Files) -> str:
    lines = (
        f"{mode} {blob}\t".encode() + os.fsencode(path) + b"\0"
        for path, (mode, blob) in files.items()
    )
    with tempfile.TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": f"{folder}/index"}
        git(root, "update-index", "-z", "--index-info", given=b"".join(lines), variables=index)
        return git(root, "write-tree", variables=index).decode().strip()


def commit_tree(root: Path, tree: str, parents: Iterable[str]) -> str:
    options = [word for parent in parents if parent for word in ("-p", parent)]
    words = ["commit-tree", "--no-gpg-sign", tree, *options, "-m", "lockstep: files of a clone"]
    return git(root, *words, variables=AUTHOR).decode().strip()


def write_here(root: Path, changes: Mapping[str, Entry | None]) -> None:
    """Give files of this clone other bytes, or remove them."""
    for name, entry in changes.items():
        path = root / name
        if {"..", ".git", ""} & set(name.split("/")):
            raise LockstepError(f"{name!r}: no name for a file of a clone")
        if entry is None:
            path.unlink(missing_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = atomic.unique(path)
        aside.write_bytes(git(root, "cat-file", "blob", entry[1]))
        os.replace(aside, path)


def git(
    root: Path, *words: str, given: bytes = b"", variables: Mapping[str, str] | None = None
) -> bytes:
    """What a command of git prints; LockstepError with what it says where it fails."""
    return _done(["git", *words], root, f"git {words[0]}", given, variables)


def _done(
    words: list[str],
    root: Path,
    what: str,
    given: bytes = b"",
    variables: Mapping[str, str] | None = None,
) -> bytes:
    try:
        done = subprocess.run(
            words,
            cwd=root,
            env={**os.environ, **(variables or {})},
            input=given,
            capture_output=True,
            check=False,
        )
    except FileNotFoundError:
        raise LockstepError(f"there is no {words[0]} on this machine: install git") from None
    if done.returncode:
        raise LockstepError(f"{root}: {what}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
