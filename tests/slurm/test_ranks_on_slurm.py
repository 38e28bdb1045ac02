"""Stages of several processes, across nodes: they find one another, agree, and name who is lost."""

import json
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow


RANKS = {
    "partition": "gpu",
    "collective_seconds": 8,
    "sft": {"nodes": 2, "tasks_per_node": 1, "gpus_per_node": 1},
}
"""Two ranks on two nodes, each with a GPU of its own (that nobody uses)."""


@pytest.fixture
def two_nodes(medium_sft: Any) -> Any:
    medium_sft.set_profile(**RANKS)
    return medium_sft


@pytest.fixture(scope="module")
def undisturbed(prepared_root: Path, cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same, left in peace."""
    clones = sys.modules["tests.slurm.conftest"]
    root = tmp_path_factory.mktemp("ranks") / "clone"
    shutil.copytree(prepared_root, root, symlinks=True)
    clone = clones.on_slurm(root, cluster)
    clone.set_params(sft__epochs=clones.MEDIUM)
    clone.set_profile(**RANKS)
    clone.run("dvc", "repro", "--single-item", "sft")
    return clone


def start(clone: Any) -> Any:
    return clone.start("dvc", "repro", "--single-item", "sft")


def test_ranks_find_one_another_across_nodes(undisturbed: Any) -> None:
    attempt = next(undisturbed.root.glob(".lockstep/jobs/sft/*/attempts/001"))
    words = [json.loads(path.read_text()) for path in sorted((attempt / "tasks").iterdir())]
    assert [word["rank"] for word in words] == [0, 1]
    assert [word["state"] for word in words] == ["completed", "done"]
    where = json.loads((attempt / "lives/000/rendezvous.json").read_text())
    assert where["address"] == "127.0.0.11"
    row = undisturbed.status()
    assert (row["gpus"], row["nodes"]) == (2, "127.0.0.[11-12]")
    assert len(undisturbed.steps()) == len(set(undisturbed.steps())), "one rank speaks for all"


def test_all_ranks_stop_at_one_step_and_go_on_to_the_same_bytes(
    two_nodes: Any, undisturbed: Any
) -> None:
    driver = start(two_nodes)
    row = two_nodes.training()
    two_nodes.cluster.run("scancel", "--signal=USR2", row["job"])
    output, _ = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 0, output
    assert two_nodes.status()["restarts"] == 1
    assert two_nodes.lock() == undisturbed.lock()


def test_a_killed_rank_is_named_and_takes_the_job_along(two_nodes: Any) -> None:
    driver = start(two_nodes)
    two_nodes.training()
    workers = two_nodes.workers()
    assert len(workers) == 2
    killed = time.monotonic()
    workers[1].kill()
    output, _ = driver.communicate(timeout=PATIENCE_S)
    assert time.monotonic() - killed < 100
    assert driver.returncode != 0
    assert "rank 1 on 127.0.0.12: Killed" in output
    assert not two_nodes.workers()


def test_a_rank_that_hangs_is_named_within_the_time_allowed(two_nodes: Any) -> None:
    driver = start(two_nodes)
    two_nodes.training()
    stuck = two_nodes.workers()[1]
    stuck.send_signal(signal.SIGSTOP)
    since = time.monotonic()
    output, _ = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode != 0
    assert time.monotonic() - since < 8 + 30
    assert "rank 1 on" in output
    assert "has not come to step" in output


def test_an_exception_of_one_rank_is_the_one_that_is_shown(two_nodes: Any) -> None:
    trap = "    if ctx.rank == 1:\n        raise ValueError('a bad shard of data')\n"
    two_nodes.begin_with("sft", trap)
    output = two_nodes.run("dvc", "repro", "--single-item", "sft", check=False).stdout
    assert "rank 1 of 2 on" in output
    assert "ValueError: a bad shard of data" in output
    assert two_nodes.status()["state"] == "failed"


def test_a_node_lost_under_some_of_the_ranks(two_nodes: Any, undisturbed: Any) -> None:
    """Slurm requeues the job; the ranks that lost their peers must not end it for good."""
    driver = start(two_nodes)
    two_nodes.training()
    two_nodes.cluster.kill_node("127.0.0.12")
    output, _ = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 0, output
    assert two_nodes.lock() == undisturbed.lock()
    assert two_nodes.status()["restarts"] >= 1


def test_a_model_is_spread_over_the_ranks_of_two_nodes(slurm_clone: Any) -> None:
    """That is execution: to gather it again reruns nothing."""
    slurm_clone.set_profile(**RANKS | {"collective_seconds": 60})
    slurm_clone.set_profile(sft={"sharding": "zero2", "offload": "optimizer"})
    slurm_clone.run("dvc", "repro", "--single-item", "sft")
    attempt = next(slurm_clone.root.glob(".lockstep/jobs/sft/*/attempts/001"))
    words = [json.loads(path.read_text()) for path in sorted((attempt / "tasks").iterdir())]
    assert [word["state"] for word in words] == ["completed", "done"]
    made_by = json.loads((attempt / "result.json").read_text())["environment"]
    assert (made_by["world"], made_by["sharding"], made_by["offload"]) == (2, "zero2", "optimizer")
    metrics = json.loads((slurm_clone.root / "metrics/sft.json").read_text())
    assert slurm_clone.steps() == list(range(1, metrics["num_steps"] + 1))

    slurm_clone.set_profile(sft={"sharding": "none", "offload": "none"})
    said = slurm_clone.run("dvc", "repro", "--single-item", "sft").stdout
    assert "didn't change, skipping" in said
