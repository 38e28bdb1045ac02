"""Stages of several processes, across nodes: they find one another, agree, and name who is lost."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clones import copy_clone
from pipelines.dvc_repo.lock_file import read_stages
from tests.slurm.conftest import MEDIUM, STAGE, copy_of_other_code, on_slurm
from tests.slurm.light_stages import COUNT_TOGETHER
from tests.waiting import failed, succeeded

pytestmark = pytest.mark.slow


RANKS = {
    "partition": "gpu",
    "collective_seconds": 60,
    "sft": {"nodes": 2, "tasks_per_node": 1, "gpus_per_node": 1},
}
"""Two ranks on two nodes, each with a GPU of its own (that nobody uses)."""


@pytest.fixture
def counting(slurm_clone: Any) -> Any:
    """On two nodes, with an SFT stage that counts for long enough to be caught at it."""
    slurm_clone.set_profile(**RANKS | {"collective_seconds": 8})
    slurm_clone.set_params(sft__epochs=20_000)
    slurm_clone.write_code("stages/sft.py", COUNT_TOGETHER)
    slurm_clone.commit("counts")
    return slurm_clone


@pytest.fixture
def two_nodes(real_sft: Any) -> Any:
    real_sft.set_profile(**RANKS)
    return real_sft


@pytest.fixture(scope="module")
def undisturbed(prepared_root: Path, cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same, left in peace."""
    root = tmp_path_factory.mktemp("ranks") / "clone"
    copy_clone(prepared_root, root)
    clone = on_slurm(root, cluster)
    clone.set_params(sft__epochs=MEDIUM)
    clone.set_profile(**RANKS)
    clone.run("dvc", "repro", "--single-item", "sft")
    return clone


def test_ranks_find_one_another_across_nodes(undisturbed: Any) -> None:
    attempt = undisturbed.attempt()
    assert [(task.rank, task.state) for task in attempt.tasks] == [(0, "completed"), (1, "done")]
    where = json.loads((attempt.folder / "restarts/000/rendezvous.json").read_text())
    assert where["address"] == "127.0.0.11"
    row = undisturbed.status()
    assert (row["gpus"], row["nodes"]) == (2, "127.0.0.[11-12]")
    assert len(undisturbed.steps()) == len(set(undisturbed.steps())), "one rank speaks for all"


def test_all_ranks_stop_at_one_step_and_go_on_to_the_same_bytes(
    two_nodes: Any, undisturbed: Any
) -> None:
    driver, row = two_nodes.start_training()
    two_nodes.cluster.run("scancel", "--signal=USR2", row["job"])
    succeeded(driver)
    assert two_nodes.status()["restarts"] == 1
    assert two_nodes.lock() == undisturbed.lock()


def test_a_killed_rank_is_named_and_takes_the_job_along(counting: Any) -> None:
    driver, _ = counting.start_training(*STAGE)
    workers = counting.workers()
    assert len(workers) == 2
    workers[1].kill()
    output = failed(driver)
    assert "rank 1 on 127.0.0.12: Killed" in output
    assert not counting.workers()


def test_a_rank_that_hangs_is_named_within_the_time_allowed(counting: Any) -> None:
    driver, _ = counting.start_training(*STAGE)
    stuck = counting.workers()[1]
    stuck.send_signal(signal.SIGSTOP)
    output = failed(driver)
    assert "rank 1 on" in output
    assert "has not come to step" in output


def test_an_exception_of_one_rank_is_the_one_that_is_shown(counting: Any) -> None:
    trap = "    if ctx.rank == 1:\n        raise ValueError('a bad shard of data')\n"
    counting.begin_with("sft", trap)
    output = counting.run("dvc", "repro", "--single-item", "sft", check=False).stdout
    assert "rank 1 of 2 on" in output
    assert "ValueError: a bad shard of data" in output
    assert counting.status()["state"] == "failed"


def test_a_node_lost_under_some_of_the_ranks(counting: Any) -> None:
    """Slurm requeues the job; the ranks that lost their peers must not end it for good."""
    counting.set_params(sft__epochs=60)
    counting.set_profile(checkpoint_seconds=0.2)
    at_home = copy_of_other_code(counting.root, counting.root.parent / "home")
    counting.hold()
    driver, _ = counting.start_training()
    saved = ".lockstep/jobs/sft/*/scratch/checkpoint-1"
    counting.until(lambda: list(counting.root.glob(saved)), "something to go on from")
    counting.cluster.kill_node("127.0.0.12")
    counting.release()
    succeeded(driver)
    at_home.run("dvc", "repro", "--single-item", "sft")
    assert counting.lock() == (at_home.root / "dvc.lock").read_text()
    assert counting.steps() == list(range(1, 61)), "each step once"
    assert counting.status()["restarts"] >= 1


def test_a_model_is_spread_over_the_ranks_of_two_nodes(slurm_clone: Any) -> None:
    """That is execution: to gather it again reruns nothing."""
    slurm_clone.set_profile(**RANKS)
    slurm_clone.set_profile(sft={"sharding": "zero2", "offload": "optimizer"})
    slurm_clone.run("dvc", "repro", "--single-item", "sft")
    attempt = slurm_clone.attempt()
    assert [task.state for task in attempt.tasks] == ["completed", "done"]
    made_by = attempt.result.environment
    assert (made_by["world"], made_by["sharding"], made_by["offload"]) == (2, "zero2", "optimizer")
    metrics = json.loads((slurm_clone.root / "metrics/sft.json").read_text())
    assert slurm_clone.steps() == list(range(1, metrics["num_steps"] + 1))

    slurm_clone.set_profile(sft={"sharding": "none", "offload": "none"})
    said = slurm_clone.run("dvc", "repro", "--single-item", "sft").stdout
    assert "didn't change, skipping" in said


def test_an_evaluation_of_ranks_over_which_models_are_spread_has_the_bytes_of_one_process(
    pipeline_on_slurm: tuple[Any, str], pipeline_root: Path
) -> None:
    clone, _ = pipeline_on_slurm
    attempt = clone.attempt(stage="evaluate_sft")
    assert [(task.rank, task.state) for task in attempt.tasks] == [(0, "completed"), (1, "done")]
    made_by = attempt.result.environment
    assert (made_by["world"], made_by["sharding"], made_by["shards"]) == (2, "fsdp", 1)
    of = [read_stages(root)["evaluate_sft"]["outs"] for root in (clone.root, pipeline_root)]
    assert of[0] == of[1]
