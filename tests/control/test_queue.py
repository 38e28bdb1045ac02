"""Queued experiments are in `lockstep status`, as DVC itself has them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.commands.cli import main
from pipelines.dvc_repo.queue import FOLDER, queued_experiments
from pipelines.runs.status import render_queue
from tests.control.recorded_policies import Recorded
from tests.waiting import until

GRAPH = """\
stages:
  slow:
    cmd: while [ ! -e {go} ]; do sleep 0.1; done; exit 3
    params: [policy_update]
    deps: [given.txt]
    outs: [artifacts/slow]
"""


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """A committed clone, whose one stage runs until it is told to fail."""
    clone = Recorded(tmp_path / "clone")
    (clone.root / "dvc.yaml").write_text(GRAPH.format(go=tmp_path / "go"))
    clone.params(0.1, "iter_001")
    clone.git("config", "user.name", "a")
    clone.git("config", "user.email", "a@b")
    clone.git("add", "-A")
    clone.git("commit", "-qm", "start")
    monkeypatch.chdir(clone.root)
    return clone


def dvc(clone: Recorded, *words: str) -> str:
    # Not a pipe: a worker of the queue lives on and would keep it open.
    said = clone.root.parent / "said"
    # As after `source .venv/bin/activate`: a worker starts `dvc` by its name.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with said.open("w") as file:
        subprocess.run(
            ["dvc", *words],
            cwd=clone.root,
            env={**os.environ, "PATH": path},
            stdout=file,
            stderr=file,
            check=True,
        )
    return said.read_text()


def states(clone: Recorded) -> dict[str, str]:
    return {each.name: each.state for each in queued_experiments(clone.root)}


def test_without_a_queue_dvc_is_not_asked(clone: Recorded):
    assert not (clone.root / FOLDER).exists()
    assert queued_experiments(clone.root) == []
    assert not (clone.root / FOLDER).exists()


def test_experiments_are_queued_run_and_fail_with_what_is_different_about_them(
    clone: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    change = "policy_update.learning_rate=0.5"
    dvc(clone, "exp", "run", "-q", "--queue", "-n", "larger", "-S", change)
    [queued] = queued_experiments(clone.root)
    assert (queued.name, queued.state) == ("larger", "queued")
    assert queued.changes == {"policy_update.learning_rate": 0.5}
    assert queued.task in dvc(clone, "queue", "status")
    capsys.readouterr()
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["experiments"] == [queued.as_json()]
    assert main(["status"]) == 0
    said = capsys.readouterr().out
    assert "queued  larger  " in said
    assert "policy_update.learning_rate=0.5" in said
    assert "`dvc queue start` runs them" in said

    dvc(clone, "queue", "start")
    try:
        until(lambda: states(clone) == {"larger": "running"}, "the experiment runs")
        assert "dvc queue start" not in render_queue(queued_experiments(clone.root))
        (tmp_path / "go").touch()
        until(lambda: states(clone) == {"larger": "failed"}, "the experiment has failed")
    finally:
        (tmp_path / "go").touch()
        dvc(clone, "queue", "stop")


def tear_a_message(clone: Recorded) -> None:
    broker = clone.root / FOLDER / "broker/in"
    broker.mkdir(parents=True)
    (broker / "1.x.celery.msg").write_text("torn")


def lose_the_commit(clone: Recorded) -> None:
    dvc(clone, "exp", "run", "-q", "--queue", "-S", "policy_update.learning_rate=0.5")
    commit = clone.git("rev-parse", "refs/exps/celery/stash")
    (clone.root / ".git/objects" / commit[:2] / commit[2:]).unlink()


@pytest.mark.parametrize("damage", [tear_a_message, lose_the_commit])
def test_a_queue_that_cannot_be_read_is_said_and_the_stages_are_shown(
    clone: Recorded, capsys: pytest.CaptureFixture[str], damage: Callable[[Recorded], None]
):
    damage(clone)
    assert main(["status", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["stages"]
    assert "DVC's queue of experiments cannot be read" in shown["problems"][0]
