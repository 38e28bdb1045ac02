"""Git's answers about a clone. Where git or the repository is missing, there are none."""

import io
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def git(root: Path, *words: str) -> str | None:
    """What a command prints; None if it fails."""
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def blob_contents(root: Path, blobs: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each blob and its text, read by one process; what is no blob is left out."""
    with cat_file(root, "--batch", blobs) as answers:
        while head := answers.readline():
            blob, _, size = head.decode().rstrip("\n").partition(" ")
            if not size.startswith("blob "):
                continue
            yield blob, answers.read(int(size.split(" ")[1])).decode(errors="replace")
            answers.read(1)


@contextmanager
def cat_file(root: Path, form: str, names: Iterable[str]) -> Iterator[IO[bytes]]:
    """The output of `git cat-file` about objects, as it comes."""
    with tempfile.TemporaryFile() as questions:
        questions.write("".join(f"{name}\n" for name in names).encode())
        questions.seek(0)
        try:
            process = subprocess.Popen(
                ["git", "cat-file", form],
                cwd=root,
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
