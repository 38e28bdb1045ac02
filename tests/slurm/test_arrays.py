"""Rollouts and scores as arrays: shared out, resumed, and merged to the same bytes."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

pytestmark = pytest.mark.slow

ROLLOUT, SCORE = "rollout@iter_001", "score@iter_001"
DIE_ONCE = """
    import os, signal
    if ctx.shard == 1 and not os.path.exists({mark!r}):
        open({mark!r}, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def trained_root(prepared_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SFT policy and a reward model, and params with eight decoding batches."""
    clone = _conftest().copy_at_home(prepared_root, tmp_path_factory.mktemp("trained"))
    clone.set_params(rollout__batch_size=4, rollout__prompts=16, rollout__samples=2)
    clone.run("lockstep", "run", "sft", "reward_model")
    root: Path = clone.root
    return root


@pytest.fixture(scope="module")
def by_one_process(trained_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What dvc.lock says of rollouts and scores that one process made, without Slurm."""
    clone = _conftest().copy_at_home(trained_root, tmp_path_factory.mktemp("one"))
    clone.run("lockstep", "run", SCORE)
    return {stage: outs(clone.root, stage) for stage in (ROLLOUT, SCORE)}


@pytest.fixture
def trained(slurm_clone: Any, trained_root: Path) -> Any:
    shutil.rmtree(slurm_clone.root)
    shutil.copytree(trained_root, slurm_clone.root, symlinks=True)
    return slurm_clone


def _conftest() -> Any:
    return sys.modules["tests.slurm.conftest"]


def outs(root: Path, stage: str) -> Any:
    return YAML(typ="safe").load(root / "dvc.lock")["stages"][stage]["outs"]


def attempt(clone: Any, number: int = 1) -> Path:
    return next(clone.root.glob(f".lockstep/jobs/{ROLLOUT}/*/attempts/{number:03}"))


def test_the_merged_artifacts_are_those_of_one_process(
    trained: Any, by_one_process: dict[str, Any]
) -> None:
    trained.set_profile(rollout={"shards": 3, "array_parallelism": 2}, score={"shards": 2})
    trained.run("lockstep", "run", SCORE)
    assert outs(trained.root, ROLLOUT) == by_one_process[ROLLOUT]
    assert outs(trained.root, SCORE) == by_one_process[SCORE]
    assert len(list((attempt(trained) / "tasks").glob("*.json"))) == 3


def test_more_shards_than_an_array_may_have_are_submitted_in_chunks(
    trained: Any, by_one_process: dict[str, Any]
) -> None:
    """The cluster's MaxArraySize is 4; two processes a job make twelve shards of six."""
    trained.set_profile(rollout={"shards": 6, "array_parallelism": 2, "tasks_per_node": 2})
    trained.run("lockstep", "run", ROLLOUT)
    assert outs(trained.root, ROLLOUT) == by_one_process[ROLLOUT]
    assert len(json.loads((attempt(trained) / "launch.json").read_text())["jobs"]) == 2
    assert len(list((attempt(trained) / "tasks").glob("*.json"))) == 12


def test_only_missing_shards_are_submitted_again_and_progress_is_of_all(
    trained: Any, by_one_process: dict[str, Any]
) -> None:
    trained.set_profile(rollout={"shards": 3, "array_parallelism": 3})
    trained.begin_with("rollout", DIE_ONCE.format(mark=str(trained.root / "sprung")))
    done = trained.run("dvc", "repro", "--single-item", ROLLOUT, check=False)
    assert done.returncode != 0
    assert "rank 0 on 127.0.0.1" in done.stdout
    assert "Killed" in done.stdout
    progress = json.loads((attempt(trained).parents[1] / "progress.json").read_text())
    assert progress["total"] == 32
    assert 0 < progress["done"] < 32, "what the other shards have done is counted, and kept"
    trained.run("dvc", "repro", "--single-item", ROLLOUT)
    assert json.loads((attempt(trained, 2) / "launch.json").read_text())["shards"] == [1]
    assert outs(trained.root, ROLLOUT) == by_one_process[ROLLOUT]


def test_a_requeued_task_of_an_array_goes_on_alone(
    trained: Any, by_one_process: dict[str, Any]
) -> None:
    trained.set_profile(rollout={"shards": 2, "array_parallelism": 2})
    # Shard 1 is told to stop as soon as it begins, in its first life only.
    stop = (
        "    import os\n"
        "    if ctx.shard == 1 and not os.environ.get('SLURM_RESTART_COUNT'):\n"
        "        ctx.request_stop()\n"
    )
    trained.begin_with("rollout", stop)
    trained.run("dvc", "repro", "--single-item", ROLLOUT)
    assert outs(trained.root, ROLLOUT) == by_one_process[ROLLOUT]
    words = [
        json.loads(path.read_text()) for path in sorted((attempt(trained) / "tasks").iterdir())
    ]
    assert [word["restart"] for word in words] == [0, 1]
