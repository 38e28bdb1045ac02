"""Rollouts and scores as arrays: shared out, resumed, and merged to the same bytes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipelines.dvc_repo.lock_file import read_stages
from tests.slurm.conftest import copy_at_home

pytestmark = pytest.mark.slow

ROLLOUT, SCORE = "rollout@iter_001", "score@iter_001"
DIE_ONCE = """
    import os, signal
    if ctx.shard == 1 and not os.path.exists({mark!r}):
        open({mark!r}, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
"""


ANSWER_BY_HASH = '''
import hashlib
from contextlib import closing

from stages.engines.generation.generator import Completion


class Hashes:
    """Stands for a policy: it needs no libraries, and answers by the request and its seed alone."""

    policy_hash = "0" * 32

    def generate(self, requests, *, max_new_tokens, sampling):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        digest = hashlib.sha256(f"{list(request.prompt_ids)} {request.seed}".encode()).digest()
        ids = [3 + byte % 8 for byte in digest[: 1 + digest[0] % 16]]
        return Completion(ids, [-1.0 / one for one in ids], digest[1] / 10, "stop")

    def close(self):
        pass


def opened(ctx, folder, engine, precision, slots, longest):
    return closing(Hashes())
'''


def answer_by_hash(clone: Any) -> None:
    """Let rollouts be those of no model, whose libraries take ten seconds to import.

    All else is the stage's own: how shards share, keep, resume and merge.
    """
    clone.write_code("stages/engines/generation/generators.py", ANSWER_BY_HASH)


@pytest.fixture(scope="module")
def by_one_process(pipeline_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What dvc.lock says of rollouts without a model that one process made, without Slurm."""
    clone = copy_at_home(pipeline_root, tmp_path_factory.mktemp("one"))
    answer_by_hash(clone)
    clone.run("dvc", "repro", "--single-item", ROLLOUT)
    return outs(clone.root, ROLLOUT)


@pytest.fixture
def trained(slurm_clone: Any, pipeline_root: Path) -> Any:
    """With all that rollouts need, and rollouts to be made anew, without a model."""
    shutil.rmtree(slurm_clone.root)
    ledger = shutil.ignore_patterns(".lockstep")
    shutil.copytree(pipeline_root, slurm_clone.root, symlinks=True, ignore=ledger)
    answer_by_hash(slurm_clone)
    return slurm_clone


def outs(root: Path, stage: str) -> Any:
    return read_stages(root)[stage]["outs"]


def test_the_merged_artifacts_are_those_of_one_process(
    pipeline_on_slurm: tuple[Any, str], pipeline_root: Path
) -> None:
    clone, _ = pipeline_on_slurm
    for stage, shards in ((ROLLOUT, 3), (SCORE, 2)):
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
