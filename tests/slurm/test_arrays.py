"""Rollouts and scores as arrays: shared out, resumed, and merged to the same bytes."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clones import copy_clone
from pipelines.dvc_repo.lock_file import read_stages
from tests.conftest import Clone
from tests.slurm.conftest import RunOnSlurm, SlurmClone, copy_of_other_code, on_slurm
from tests.slurm.light_stages import ANSWER_BY_HASH

pytestmark = pytest.mark.slow

ROLLOUT, SCORE = "rollout@iter_001", "score@iter_001"
DIE_ONCE = """
    import os, signal
    if ctx.shard == 1 and not os.path.exists({mark!r}):
        open({mark!r}, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def trained_root(pipeline_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With all that rollouts need, and rollouts to be made anew, without a model."""
    root = tmp_path_factory.mktemp("trained") / "clone"
    ledger = shutil.ignore_patterns(".lockstep")
    shutil.copytree(pipeline_root, root, symlinks=True, ignore=ledger)
    Clone(root).write_code("stages/engines/generation/generators.py", ANSWER_BY_HASH)
    return root


@pytest.fixture(scope="module")
def by_one_process(trained_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What dvc.lock says of rollouts without a model that one process made, without Slurm."""
    clone = copy_of_other_code(trained_root, tmp_path_factory.mktemp("one"))
    clone.run("dvc", "repro", "--single-item", ROLLOUT)
    return outs(clone.root, ROLLOUT)


@pytest.fixture
def trained(trained_root: Path, tmp_path: Path, cluster: Any) -> Iterator[SlurmClone]:
    """A copy of it whose jobs go to the cluster."""
    copy_clone(trained_root, tmp_path / "clone")
    clone = on_slurm(tmp_path / "clone", cluster)
    yield clone
    clone.kill_all()


def outs(root: Path, stage: str) -> Any:
    return read_stages(root)[stage]["outs"]


def test_the_merged_artifacts_are_those_of_one_process(
    pipeline_on_slurm: RunOnSlurm, pipeline_root: Path
) -> None:
    clone = pipeline_on_slurm.clone
    for stage, shards in ((ROLLOUT, 2), (SCORE, 2)):
        assert outs(clone.root, stage) == outs(pipeline_root, stage)
        assert len(clone.attempt(stage=stage).tasks) == shards


def test_more_shards_than_an_array_may_have_are_submitted_in_chunks(
    trained: Any, by_one_process: Any
) -> None:
    """The cluster's MaxArraySize is 4; two processes a job make twelve shards of six."""
    trained.set_profile(rollout={"shards": 6, "array_parallelism": 2, "tasks_per_node": 2})
    trained.run("dvc", "repro", "--single-item", ROLLOUT)
    assert outs(trained.root, ROLLOUT) == by_one_process
    attempt = trained.attempt(stage=ROLLOUT)
    assert (len(attempt.launched.jobs), len(attempt.tasks)) == (2, 12)


def test_only_missing_shards_are_submitted_again_and_progress_is_of_all(
    trained: Any, by_one_process: Any
) -> None:
    trained.set_profile(rollout={"shards": 3, "array_parallelism": 3})
    trained.begin_with("rollout", DIE_ONCE.format(mark=str(trained.root / "sprung")))
    done = trained.run("dvc", "repro", "--single-item", ROLLOUT, check=False)
    assert done.returncode != 0
    assert "rank 0 on 127.0.0.1" in done.stdout
    assert "Killed" in done.stdout
    entry = trained.attempt(stage=ROLLOUT).entry
    progress = json.loads((entry.folder / "progress.json").read_text())
    assert progress["total"] == 32
    assert 0 < progress["done"] < 32, "what the other shards have done is counted, and kept"
    trained.run("dvc", "repro", "--single-item", ROLLOUT)
    assert trained.attempt(2, ROLLOUT).launched.shards == (1,)
    assert outs(trained.root, ROLLOUT) == by_one_process


def test_a_requeued_task_of_an_array_goes_on_alone(trained: Any, by_one_process: Any) -> None:
    trained.set_profile(rollout={"shards": 2, "array_parallelism": 2})
    # Shard 1 is told to stop as soon as it begins, in its first start only.
    stop = (
        "    import os\n"
        "    if ctx.shard == 1 and not os.environ.get('SLURM_RESTART_COUNT'):\n"
        "        ctx.request_stop()\n"
    )
    trained.begin_with("rollout", stop)
    trained.run("dvc", "repro", "--single-item", ROLLOUT)
    assert outs(trained.root, ROLLOUT) == by_one_process
    assert [task.restart for task in trained.attempt(stage=ROLLOUT).tasks] == [0, 1]
