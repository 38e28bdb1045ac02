"""Stages of several processes, across nodes: they find one another, agree, and name who is lost."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def two_nodes(medium_sft: Any) -> Any:
    """SFT as four ranks on two nodes, each with a GPU of its own (that nobody uses)."""
    medium_sft.set_profile(
        partition="gpu",
        sft={"nodes": 2, "tasks_per_node": 2, "gpus_per_node": 2, "memory": "1800M"},
        collective_seconds=8,
    )
    return medium_sft


def start(clone: Any) -> Any:
    return clone.start("dvc", "repro", "--single-item", "sft")


def life(clone: Any, restart: int = 0) -> Path:
    attempt = next(clone.root.glob(".lockstep/jobs/sft/*/attempts/001"))
    return attempt / "lives" / f"{restart:03}"


def test_ranks_train_together_and_stop_together(two_nodes: Any) -> None:
    """The warning makes all ranks stop at one step; what comes out is that of an undisturbed run."""
    two_nodes.run("dvc", "repro", "--single-item", "sft")
    undisturbed = two_nodes.lock()
    attempt = next(two_nodes.root.glob(".lockstep/jobs/sft/*/attempts/001"))
    words = [json.loads(path.read_text()) for path in sorted((attempt / "tasks").iterdir())]
    assert [word["rank"] for word in words] == [0, 1, 2, 3]
    assert two_nodes.status()["gpus"] == 4
    where = json.loads((life(two_nodes) / "rendezvous.json").read_text())
    assert where["address"].startswith("127.0.0.1")
    driver = two_nodes.start("dvc", "repro", "--force", "--single-item", "sft")
    two_nodes.until(lambda: len(list(two_nodes.root.glob(".lockstep/jobs/sft/*"))) == 2, "again")
    row = two_nodes.training()
    two_nodes.cluster.run("scancel", "--signal=USR2", row["job"])
    output, _ = driver.communicate(timeout=180)
    assert driver.returncode == 0, output
    assert two_nodes.status()["restarts"] == 1
    assert two_nodes.lock() == undisturbed


def test_a_killed_rank_is_named_and_takes_the_job_along(two_nodes: Any) -> None:
    driver = start(two_nodes)
    two_nodes.training()
    workers = two_nodes.workers()
    assert len(workers) == 4
    killed = time.monotonic()
    workers[2].kill()
    output, _ = driver.communicate(timeout=60)
    assert time.monotonic() - killed < 30
    assert driver.returncode != 0
    assert "rank 2 on 127.0.0.12: Killed" in output
    assert not two_nodes.workers()


def test_a_rank_that_hangs_is_named_within_the_time_allowed(two_nodes: Any) -> None:
    driver = start(two_nodes)
    two_nodes.training()
    stuck = two_nodes.workers()[3]
    stuck.send_signal(signal.SIGSTOP)
    since = time.monotonic()
    output, _ = driver.communicate(timeout=90)
    assert driver.returncode != 0
    assert time.monotonic() - since < 8 + 30
    assert "rank 3 on" in output
    assert "has not come to step" in output


def test_an_exception_of_one_rank_is_the_one_that_is_shown(two_nodes: Any) -> None:
    code = two_nodes.root / "stages/sft.py"
    line = "    params = config.sft\n"
    trap = "    if ctx.rank == 1:\n        raise ValueError('a bad shard of data')\n"
    code.write_text(code.read_text().replace(line, line + trap))
    output = two_nodes.run("dvc", "repro", "--single-item", "sft", check=False).stdout
    assert "rank 1 of 4 on" in output
    assert "ValueError: a bad shard of data" in output
    assert two_nodes.status()["state"] == "failed"


def test_a_node_lost_under_some_of_the_ranks(two_nodes: Any) -> None:
    """Slurm requeues the job; the ranks that lost their peers must not end it for good."""
    two_nodes.run("dvc", "repro", "--single-item", "sft")
    undisturbed = two_nodes.lock()
    driver = two_nodes.start("dvc", "repro", "--force", "--single-item", "sft")
    two_nodes.until(lambda: len(list(two_nodes.root.glob(".lockstep/jobs/sft/*"))) == 2, "again")
    two_nodes.training()
    two_nodes.cluster.kill_node("127.0.0.12")
    output, _ = driver.communicate(timeout=180)
    if driver.poll() is None:
        os.killpg(driver.pid, signal.SIGTERM)
    assert driver.returncode == 0, output
    assert two_nodes.lock() == undisturbed
    assert two_nodes.status()["restarts"] >= 1
