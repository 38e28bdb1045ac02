"""Stages of several processes, across nodes: they find one another, agree, and name who is lost."""

import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clones import copy_clone
from pipelines.dvc_repo.lock_file import read_stages
from tests.slurm.conftest import (
    STAGE,
    RunOnSlurm,
    copy_at_home,
    copy_of_other_code,
    lose_node,
    on_slurm,
    root_of_ranks_that_meet,
)
from tests.waiting import failed, succeeded

pytestmark = pytest.mark.slow


RANKS = {
    "partition": "gpu",
    "collective_seconds": 60,
    "sft": {"nodes": 2, "tasks_per_node": 1, "gpus_per_node": 1},
}
"""Two ranks on two nodes, each with a GPU of its own (that nobody uses)."""


@pytest.fixture(scope="module")
def counting_root(prepared_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a clone with an SFT stage whose ranks meet at each of 60 steps. Read it only."""
    folder = tmp_path_factory.mktemp("together")
    return root_of_ranks_that_meet(prepared_root, folder, epochs=60)


@pytest.fixture(scope="module")
def undisturbed_lock(counting_root: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """dvc.lock after that stage, run by one process of this machine and left in peace."""
    clone = copy_of_other_code(counting_root, tmp_path_factory.mktemp("in-peace"))
    clone.run("dvc", "repro", "--single-item", "sft")
    return (clone.root / "dvc.lock").read_text()


@pytest.fixture
def counting(counting_root: Path, tmp_path: Path, cluster: Any) -> Iterator[Any]:
    """A copy of it on two nodes."""
    copy_clone(counting_root, tmp_path / "clone")
    clone = on_slurm(tmp_path / "clone", cluster)
    clone.set_profile(**RANKS)
    yield clone
    clone.kill_all()


@pytest.fixture
def long_counting(counting: Any) -> Any:
    """One that counts for long enough to be caught at it."""
    counting.set_params(sft__epochs=20_000)
    return counting


@pytest.fixture(scope="module")
def spread(prepared_root: Path, cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A clone after a real SFT stage whose state two nodes have shared."""
    root = tmp_path_factory.mktemp("ranks") / "clone"
    copy_clone(prepared_root, root)
    clone = on_slurm(root, cluster)
    clone.set_profile(**RANKS)
    clone.set_profile(sft={"sharding": "zero2", "offload": "optimizer"})
    clone.run("dvc", "repro", "--single-item", "sft")
    return clone


def test_ranks_find_one_another_across_nodes(spread: Any) -> None:
    attempt = spread.attempt()
    assert [(task.rank, task.state) for task in attempt.tasks] == [(0, "completed"), (1, "done")]
    where = json.loads((attempt.folder / "restarts/000/rendezvous.json").read_text())
    assert where["address"] == "127.0.0.11"
    row = spread.status()
    assert (row["gpus"], row["nodes"]) == (2, "127.0.0.[11-12]")


def test_a_model_is_spread_over_the_ranks_of_two_nodes(spread: Any) -> None:
    """That is execution: to gather it again reruns nothing."""
    made_by = spread.attempt().result.environment
    assert (made_by["world"], made_by["sharding"], made_by["offload"]) == (2, "zero2", "optimizer")
    metrics = json.loads((spread.root / "metrics/sft.json").read_text())
    assert spread.steps() == list(range(1, metrics["num_steps"] + 1)), "one rank speaks for all"

    spread.set_profile(sft={"sharding": "none", "offload": "none"})
    said = spread.run("dvc", "repro", "--single-item", "sft").stdout
    assert "didn't change, skipping" in said


def test_all_ranks_stop_at_one_step_and_go_on_to_the_same_bytes(
    counting: Any, undisturbed_lock: str
) -> None:
    """As real ones do, whose stage is asked to stop: tests/stages/test_ranks.py."""
    counting.hold()
    driver, row = counting.start_training()
    counting.cluster.run("scancel", "--signal=USR2", row["job"])
    counting.until(lambda: counting.status()["restarts"] == 1, "a restart")
    counting.release()
    succeeded(driver)
    assert counting.status()["restarts"] == 1
    assert counting.steps() == list(range(1, 61)), "each step once"
    assert counting.lock() == undisturbed_lock


def test_a_killed_rank_is_named_and_takes_the_job_along(long_counting: Any) -> None:
    driver, _ = long_counting.start_training(*STAGE)
    workers = long_counting.workers()
    assert len(workers) == 2
    workers[1].kill()
    output = failed(driver)
    assert "rank 1 on 127.0.0.12: Killed" in output
    assert not long_counting.workers()


def test_a_rank_that_hangs_is_named_within_the_time_allowed(long_counting: Any) -> None:
    long_counting.set_profile(collective_seconds=20)
    driver, _ = long_counting.start_training(*STAGE)
    stuck = long_counting.workers()[1]
    stuck.send_signal(signal.SIGSTOP)
    output = failed(driver)
    assert "rank 1 on" in output
    assert "has not come to step" in output


def test_an_exception_of_one_rank_is_the_one_that_is_shown(long_counting: Any) -> None:
    trap = "    if ctx.rank == 1:\n        raise ValueError('a bad shard of data')\n"
    long_counting.begin_with("sft", trap)
    output = long_counting.run("dvc", "repro", "--single-item", "sft", check=False).stdout
    assert "rank 1 of 2 on" in output
    assert "ValueError: a bad shard of data" in output
    assert long_counting.status()["state"] == "failed"


def test_a_node_lost_under_some_of_the_ranks(counting: Any, undisturbed_lock: str) -> None:
    """Slurm requeues the job; the ranks that lost their peers must not end it for good."""
    counting.set_profile(checkpoint_seconds=0.2)
    counting.hold()
    driver, _ = counting.start_training()
    saved = ".lockstep/jobs/sft/*/scratch/checkpoint-1"
    counting.until(lambda: list(counting.root.glob(saved)), "something to go on from")
    counting.cluster.kill_node("127.0.0.12")
    notes = counting.attempt().folder / "restarts/000"
    counting.until(lambda: list(notes.glob("failure-*.json")), "the other rank misses its peer")
    lose_node(counting.cluster, "127.0.0.12")
    counting.release()
    succeeded(driver)
    assert counting.lock() == undisturbed_lock
    assert counting.steps() == list(range(1, 61)), "each step once"
    assert counting.status()["restarts"] >= 1


@pytest.mark.parametrize(
    ("stage", "sharding"), [("evaluate_sft", "fsdp"), ("evaluate@iter_001", "none")]
)
def test_an_evaluation_over_two_nodes_has_the_bytes_of_one_process(
    pipeline_on_slurm: RunOnSlurm, pipeline_root: Path, stage: str, sharding: str
) -> None:
    """Its ranks share the responses; models are whole on each of them, or spread over them."""
    clone = pipeline_on_slurm.clone
    assert_of_two_nodes(clone, stage, sharding)
    assert outs(clone.root, stage) == outs(pipeline_root, stage)


@pytest.fixture(scope="module")
def reading(pipeline_root: Path, cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """With rollouts to score, and a preference run to come; nothing is known of earlier jobs."""
    root = tmp_path_factory.mktemp("reading") / "clone"
    ledger = shutil.ignore_patterns(".lockstep")
    shutil.copytree(pipeline_root, root, symlinks=True, ignore=ledger)
    clone = on_slurm(root, cluster)
    clone.set_params(rl__preferences={"dpo": {"policy": "sft"}})
    spread = {"nodes": 2, "shards": 1, "sharding": "fsdp"}
    clone.set_profile(score=spread, reference_logprobs=spread)
    yield clone
    clone.kill_all()


def test_scores_by_ranks_of_two_nodes_are_those_of_one_process(
    reading: Any, pipeline_root: Path
) -> None:
    stage = "score@iter_001"
    reading.run("dvc", "repro", "--force", "--single-item", stage)
    assert_of_two_nodes(reading, stage, "fsdp")
    assert outs(reading.root, stage) == outs(pipeline_root, stage)


def test_reference_logprobs_by_ranks_of_two_nodes_are_those_of_one_process(
    reading: Any, tmp_path: Path
) -> None:
    stage = "reference_logprobs@dpo"
    at_home = copy_at_home(reading.root, tmp_path)
    reading.run("dvc", "repro", "--single-item", stage)
    assert_of_two_nodes(reading, stage, "fsdp")
    at_home.run("dvc", "repro", "--single-item", stage)
    assert outs(reading.root, stage) == outs(at_home.root, stage)


def assert_of_two_nodes(clone: Any, stage: str, sharding: str) -> None:
    attempt = clone.attempt(stage=stage)
    assert [(task.rank, task.state) for task in attempt.tasks] == [(0, "completed"), (1, "done")]
    assert re.fullmatch(r"127\.0\.0\.\[1\d[-,]1\d\]", clone.status(stage)["nodes"])
    made_by = attempt.result.environment
    assert (made_by["world"], made_by["sharding"], made_by["shards"]) == (2, sharding, 1)


def outs(root: Path, stage: str) -> Any:
    return read_stages(root)[stage]["outs"]
