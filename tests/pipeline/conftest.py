"""One tiny pipeline, run once by `dvc repro` in a session, and copies of it to try things in."""

import hashlib
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.clones import copy_clone
from pipelines.base.repository import Repository
from pipelines.worker.session import sessions
from tests.conftest import TINY, Clone, copy_tree
from tests.waiting import until


def planned(clone: Clone) -> dict[str, bool]:
    """The stages that the report needs, and whether they are stale."""
    plan = json.loads(clone.run("lockstep", "plan", "--json").stdout)
    return {stage["address"]: stage["stale"] for stage in plan}


def stale(clone: Clone) -> set[str]:
    """The stages that the plan would run."""
    return {address for address, is_stale in planned(clone).items() if is_stale}


def commands(line: str) -> Iterator[list[str]]:
    """Those in one line of a shell, of the simple sort that people are shown: `A; B && C  # why`.

    Run one by one they are forked from processes that are ready, which those of a shell are not.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in (";", "&&"):
            words.append(word)
        elif words:
            yield words
            words = []


def contents(clone: Clone) -> dict[str, str]:
    """The hash of every file that the pipeline makes."""
    files = [path for top in ("artifacts", "metrics") for path in (clone.root / top).rglob("*")]
    return {
        path.relative_to(clone.root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.is_file()
    }


@pytest.fixture(scope="session")
def finished_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A clone in which `dvc repro` went through as users type it, committed. Read it only."""
    clone = copy_tree(tmp_path_factory.mktemp("finished") / "clone")
    clone.set_params(**TINY)
    clone.commit("tiny")
    with clone.session():
        repro = clone.start("dvc", "repro")
        output, _ = repro.communicate()
        assert repro.returncode == 0, output
        clone.run("lockstep", "sync")
        session = sessions(Repository(clone.root))[0]
        until(lambda: session.heartbeat.served == 9, "the session's last word")
    clone.commit("results")
    # One file instead of a thousand: each test gets a copy.
    clone.run("git", "gc", "--quiet")
    yield clone.root
    clone.kill_all()


@pytest.fixture
def finished(finished_root: Path, tmp_path: Path) -> Iterator[Clone]:
    """A copy of the finished clone, cache and ledger included."""
    root = tmp_path / "clone"
    copy_clone(finished_root, root)
    clone = Clone(root)
    yield clone
    clone.kill_all()
