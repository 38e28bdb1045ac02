"""One small and real history: two iterations, then another learning rate, then other code."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clones import copy_clone
from pipelines.commands.cli import main
from tests.conftest import TINY, Clone, copy_tree

HOSTILE = "<script>alert(\"x\")</script> `rm` 'q'\n| a -> b"
"""A prompt that would break every form of output that does not escape it."""

_LINE = "    rewards = combine(by_source, weights)\n"


@dataclass(frozen=True)
class Answer:
    """What a command said."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass
class Asker:
    """Asks `lockstep lineage`, or another command, in a clone, in this process."""

    capsys: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch
    root: Path
    command: str = "lineage"

    def __call__(self, *words: str, at: Path | None = None) -> Answer:
        self.monkeypatch.chdir(at or self.root)
        self.capsys.readouterr()
        status = main([self.command, *words])
        out, err = self.capsys.readouterr()
        return Answer(status, out, err)


@pytest.fixture(scope="session")
def history_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three commits with results, tagged `first`, `faster` and `kinder`. Read it, do not write."""
    clone = make_history(tmp_path_factory.mktemp("history") / "clone")
    yield clone.root
    clone.kill_all()


def make_history(root: Path) -> Clone:
    """The pipeline for two iterations, again with another param, and one stage with new code."""
    clone = copy_tree(root)
    two = {"iter_001": {"policy": "sft"}, "iter_002": {"policy": "iter_001"}}
    clone.set_params(**{**TINY, "rl__iterations": two})
    clone.commit("tiny")
    with clone.session():
        clone.run("dvc", "repro", "policy_update@iter_002")
        clone.commit("first results")
        clone.run("git", "tag", "first")

        clone.set_params(policy_update__learning_rate=1e-3)
        clone.run("dvc", "repro", "policy_update@iter_002")
        clone.commit("a faster policy")
        clone.run("git", "tag", "faster")

    score = clone.root / "stages" / "score.py"
    score.write_text(score.read_text().replace(_LINE, f"{_LINE}    rewards = rewards + 1\n"))
    clone.commit("kinder scores")
    clone.run("dvc", "repro", "--single-item", "code", "score@iter_002")
    clone.run("lockstep", "sync")
    clone.commit("results of kinder scores")
    clone.run("git", "tag", "kinder")
    return clone


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the machine's own tracking gets in; lines are as wide as in the guide."""
    for name in list(os.environ):
        if name.startswith(("MLFLOW_", "LOCKSTEP_", "DVC_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def ask(
    history_root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Asker:
    """Questions about the history as it is."""
    return Asker(capsys, monkeypatch, history_root)


@pytest.fixture
def copy(history_root: Path, tmp_path: Path) -> Clone:
    """A copy of the history, ledger and cache included, to change at will."""
    copy_clone(history_root, tmp_path / "clone")
    return Clone(tmp_path / "clone")


@pytest.fixture
def ask_copy(
    copy: Clone, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Asker:
    return Asker(capsys, monkeypatch, copy.root)
